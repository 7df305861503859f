"""The schema of what a run writes, and what runs of older schemas wrote, in the words of this one.

| schema | written by | what is other than in the one before |
|---|---|---|
| 1 | 0.1 | it does not say which schema it is |
| 2 | 0.2 | `recipe.order`; `figures` was `top`, `samples_per_s` was `images_per_s`; no `correct1` |

`started` events and state.json say their schema. A recipe need not: a run records each key that its version knows, and
one that is missing had no other value than this one then.
"""

from collections.abc import Mapping
from typing import Any, Final

from lockstep.errors import UsageError

SCHEMA: Final = 2
ABSENT: Final = {"order": "argsort"}  # what a recorded recipe without these keys was made by

Found = Mapping[str, Any]


def check(schema: object, place: object) -> None:
    """Raise UsageError where the file at `place` is of a newer schema than this version knows."""
    if isinstance(schema, int) and schema > SCHEMA:
        newer = f"schema {schema}, and this version of Lockstep reads {SCHEMA} and older"
        raise UsageError(f"{place}: written by a newer version: {newer}; use the one that wrote it")


def recipe(found: Found) -> dict[str, Any]:
    """Return the recipe that a run recorded, of whatever schema, with all keys that decide its numbers."""
    return {**found, **{key: value for key, value in ABSENT.items() if key not in found}}


def state(found: Found) -> dict[str, Any]:
    """Return the state of a checkpoint, of whatever schema, as one of this schema."""
    new = {"schema": SCHEMA, **found}
    if isinstance(progress := found.get("progress"), dict):
        new["progress"] = _rename_key(progress, "top", "figures")
    if isinstance(before := found.get("recipe"), dict):
        new["recipe"] = recipe(before)
    return new


def event(found: Found) -> dict[str, Any]:
    """Return an event, of whatever schema, as one of this schema."""
    if found.get("event") == "started" and "schema" not in found:
        return {"unit": "samples", "fractions": ["top1", "top5"], "monitor": "top1", **found}
    return _rename_key(found, "images_per_s", "samples_per_s")


def _rename_key(found: Found, old: str, new: str) -> dict[str, Any]:
    return dict(found) if new in found else {new if name == old else name: each for name, each in found.items()}
