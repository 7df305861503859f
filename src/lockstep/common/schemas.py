"""The schema of what a run writes: `started` events and state.json say it."""

from typing import Final

from lockstep.errors import UsageError

SCHEMA: Final = 2


def check(schema: object, place: object) -> None:
    """Raise UsageError where the file at `place` is of a newer schema than this version knows."""
    if isinstance(schema, int) and schema > SCHEMA:
        newer = f"schema {schema}, and this version of Lockstep reads {SCHEMA}"
        raise UsageError(f"{place}: written by a newer version: {newer}; use the one that wrote it")
