"""The recipe that a run folder's config.yaml says, as text and not validated: runs of other versions have one too.

Quick, for lists of many runs: no pydantic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from lockstep import plainfile
from lockstep.config.document import dotted, parse
from lockstep.config.write import flow, leaves
from lockstep.core import schemas
from lockstep.core.text import printable_line

_LARGEST: Final = 1 << 18  # bytes
_WHERE: Final = ("data.root", "data.download", "model.weights.path")  # where things lie makes no other run


def recorded_recipe(file: Path) -> dict[str, str]:
    """Return the values of a recipe by their dotted keys, fit to print; empty where the file cannot be read."""
    try:
        values = parse(plainfile.content(file, _LARGEST).decode(), str(file)).values
    except (OSError, UnicodeDecodeError):
        return {}
    recipe = values.get("recipe") if isinstance(values, dict) else None
    recorded = schemas.recipe(recipe) if isinstance(recipe, dict) else {}
    found = [(dotted(path), value) for path, value in leaves(recorded) if value != {}]
    return {printable_line(key): printable_line(flow(value)) for key, value in found if key not in _WHERE}
