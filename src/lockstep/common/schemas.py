"""The schema version of the files in a run folder. It is stored in `started` events and in state.json."""

from typing import Final

from lockstep.errors import UsageError

SCHEMA: Final = 2


def check_schema(schema: object, path: object) -> None:
    """Raise UsageError if the file at `path` has a newer schema than this version of Lockstep supports."""
    if isinstance(schema, int) and schema > SCHEMA:
        newer = f"schema {schema}, this version supports schema {SCHEMA}"
        raise UsageError(f"{path}: written by a newer version of Lockstep ({newer}); use the version that wrote it")
