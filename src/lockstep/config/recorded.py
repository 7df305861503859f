"""The recipe and the placement in a run folder's config.yaml, as text and not validated: other versions wrote some too.

Quick, for lists of many runs: no pydantic.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from lockstep.common import plainfile, schemas
from lockstep.common.text import printable_line
from lockstep.config.document import format_key, mapping_at, parse
from lockstep.config.write import flow, leaves

_LARGEST: Final = 1 << 18  # bytes
_WHERE: Final = ("data.root", "data.download", "model.weights.path")  # where things lie makes no other run


class RecordedConfig(NamedTuple):
    """The values of a recipe and of the placement that the last start had, by their dotted keys and fit to print."""

    recipe: dict[str, str]
    placement: dict[str, str]


def read_recorded_config(file: Path) -> RecordedConfig:
    """Return what a config.yaml says; empty where it cannot be read."""
    try:
        values = parse(plainfile.content(file, _LARGEST).decode(), str(file)).values
    except (OSError, UnicodeDecodeError):
        values = None
    recipe, placement = mapping_at(values, "recipe"), mapping_at(values, "placement")
    return RecordedConfig(_printable(schemas.recipe(recipe)) if recipe else {}, _printable(placement))


def _printable(section: Mapping[str, Any]) -> dict[str, str]:
    found = [(format_key(path), value) for path, value in leaves(section) if value != {}]
    return {printable_line(key): printable_line(flow(value)) for key, value in found if key not in _WHERE}
