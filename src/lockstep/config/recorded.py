"""Reads the recipe and the placement from a run folder's config.yaml, as text.

The values aren't validated, because a different version of Lockstep may have written the file. This module doesn't
import pydantic, so that listing many runs is fast.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from lockstep.common import plainfile
from lockstep.common.text import printable_line
from lockstep.config.document import format_key, get_mapping, parse
from lockstep.config.write import format_flow, iterate_leaves

CONFIG_NAME: Final = "config.yaml"  # in the run folder
_MAX_BYTES: Final = 1 << 18  # maximum size of config.yaml
_MIXTURE: Final = "mixture"  # name of the dataset that combines several source datasets


class RecordedConfig(NamedTuple):
    """The recipe and the placement that a run was last started with, as printable strings by dotted key."""

    recipe: dict[str, str]
    placement: dict[str, str]


def format_resume_command(folder: Path) -> str:
    """Return the command that resumes the run of a recipe in a run folder."""
    return shlex.join(["lockstep", "train", str(folder / CONFIG_NAME), f"run.dir={folder}"])


def read_recorded_config(file: Path) -> RecordedConfig:
    """Read a config.yaml. If it can't be read, the recipe and the placement are empty."""
    try:
        values = parse(plainfile.read_bytes(file, _MAX_BYTES).decode(), str(file)).values
    except (OSError, UnicodeDecodeError):
        values = None
    recipe, placement = get_mapping(values, "recipe"), get_mapping(values, "placement")
    return RecordedConfig(_to_printable(drop_locations(recipe)) if recipe else {}, _to_printable(placement))


def drop_locations(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe without the locations of data and pretrained weights, because files can be moved.

    This includes the locations of the source datasets in a mixture.
    """
    remaining = dict(recipe)
    if data := get_mapping(recipe, "data"):
        remaining["data"] = _drop_data_locations(data)
    model = get_mapping(recipe, "model")
    if weights := get_mapping(model, "weights"):
        remaining["model"] = {**model, "weights": {key: value for key, value in weights.items() if key != "path"}}
    return remaining


def find_location_keys(recipe: Mapping[str, Any]) -> set[str]:
    """Return the dotted keys that `drop_locations` removes from a recipe."""
    all_keys, kept = (
        {format_key(path) for path, _ in iterate_leaves(mapping)} for mapping in (recipe, drop_locations(recipe))
    )
    return all_keys - kept


def get_mixture_sources(name: object, options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the source datasets of a mixture by name, without invalid sources.

    `name` and `options` are those of a dataset. Returns an empty mapping if the dataset isn't a mixture.
    """
    sources = options.get("of") if name == _MIXTURE else None
    items = sources.items() if isinstance(sources, Mapping) else ()
    return {
        label: source for label, source in items if isinstance(source, Mapping) and isinstance(source.get("name"), str)
    }


def _drop_data_locations(data: Mapping[str, Any]) -> dict[str, Any]:
    remaining = {key: value for key, value in data.items() if key not in ("root", "download")}
    options = get_mapping(data, "options")
    if sources := get_mixture_sources(data.get("name"), options):
        remaining["options"] = {
            **options,
            "of": {label: _drop_data_locations(source) for label, source in sources.items()},
        }
    return remaining


def _to_printable(section: Mapping[str, Any]) -> dict[str, str]:
    values = [(format_key(path), value) for path, value in iterate_leaves(section) if value != {}]
    return {printable_line(key): printable_line(format_flow(value)) for key, value in values}
