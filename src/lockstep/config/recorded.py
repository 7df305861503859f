"""The recipe and the placement in a run folder's config.yaml, as text and not validated: other versions wrote some too.

Quick, for lists of many runs: no pydantic.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from lockstep.common import plainfile
from lockstep.common.text import printable_line
from lockstep.config.document import format_key, mapping_at, parse
from lockstep.config.write import flow, leaves

CONFIG: Final = "config.yaml"  # of a run, in its folder
_LARGEST: Final = 1 << 18  # bytes
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
    return RecordedConfig(_printable(elsewhere(recipe)) if recipe else {}, _printable(placement))


def elsewhere(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values without where data, the sources of a mixture and first weights lie: these may move."""
    found = dict(recipe)
    if data := mapping_at(recipe, "data"):
        found["data"] = _elsewhere(data)
    model = mapping_at(recipe, "model")
    if weights := mapping_at(model, "weights"):
        found["model"] = {**model, "weights": {key: value for key, value in weights.items() if key != "path"}}
    return found


def locations(recipe: Mapping[str, Any]) -> set[str]:
    """Return the dotted keys of what `elsewhere` leaves out."""
    whole, left = ({format_key(path) for path, _ in leaves(each)} for each in (recipe, elsewhere(recipe)))
    return whole - left


def mixed(name: object, options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the data sets that one of this name is a mixture of, by their names; what is none is left out."""
    sources = options.get("of") if name == _MIXTURE else None
    named = sources.items() if isinstance(sources, Mapping) else ()
    return {own: source for own, source in named if isinstance(source, Mapping) and isinstance(source.get("name"), str)}


def _elsewhere(data: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in data.items() if key not in ("root", "download")}
    options = mapping_at(data, "options")
    if sources := mixed(data.get("name"), options):
        found["options"] = {**options, "of": {own: _elsewhere(source) for own, source in sources.items()}}
    return found


def _printable(section: Mapping[str, Any]) -> dict[str, str]:
    found = [(format_key(path), value) for path, value in leaves(section) if value != {}]
    return {printable_line(key): printable_line(flow(value)) for key, value in found}
