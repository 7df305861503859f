"""The recipe and the placement in a run folder's config.yaml, as text and not validated: other versions wrote some too.

Quick, for lists of many runs: no pydantic.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from lockstep.common import plainfile, schemas
from lockstep.common.text import printable_line
from lockstep.config.document import format_key, mapping_at, parse
from lockstep.config.write import flow, leaves

_LARGEST: Final = 1 << 18  # bytes
# Where things lie, the sources of a mixture among them, makes no other run.
_WHERE: Final = re.compile(r"(recipe\.)?(data(\.options\.of\..+)?\.root|data\.download|model\.weights\.path)")


_MIXTURE: Final = "mixture"  # of data sets, which stand in its options


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


def says_where(key: str) -> bool:
    """Return whether a key of a recipe says where something lies."""
    return _WHERE.fullmatch(key) is not None


def mixed(name: str, options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the data sets that one of this name is a mixture of, by their names; what is none is left out."""
    sources = options.get("of") if name == _MIXTURE else None
    named = sources.items() if isinstance(sources, Mapping) else ()
    return {own: source for own, source in named if isinstance(source, Mapping) and isinstance(source.get("name"), str)}


def _printable(section: Mapping[str, Any]) -> dict[str, str]:
    found = [(format_key(path), value) for path, value in leaves(section) if value != {}]
    return {printable_line(key): printable_line(flow(value)) for key, value in found if not says_where(key)}
