"""The schema version of the files of a run. `started` events and state.json contain it."""

from typing import Final

from lockstep.errors import UsageError

SCHEMA: Final = 2


def check(schema: object, place: object) -> None:
    """Raise UsageError if the file at `place` has a newer schema than this version of Lockstep supports."""
    if isinstance(schema, int) and schema > SCHEMA:
        newer = f"schema {schema}, and this version of Lockstep reads {SCHEMA}"
        raise UsageError(f"{place}: written by a newer version: {newer}; use the one that wrote it")
