"""Keeps the default values of earlier Lockstep versions for runs that were started with those versions.

The config.yaml in a run folder contains every value, including defaults. If the default of a key has changed since the
run was started, and the recipe doesn't set this key, the run resumes with the original value.
"""

from pathlib import Path as FilePath
from typing import Any, Final

from lockstep.common import plainfile
from lockstep.config.document import Document, Path, get_mapping, parse
from lockstep.core.work import compute_legacy_microbatches

_CONFIG: Final = "config.yaml"
_MAX_BYTES: Final = 1 << 18  # maximum size of config.yaml
_KEY: Final[Path] = ("recipe", "microbatches")


def keep_earlier_defaults(document: Document) -> None:
    """Set `recipe.microbatches` in `document` if the resumed run was started with the default of an earlier version."""
    recipe, run = get_mapping(document.values, "recipe"), get_mapping(document.values, "run")
    batch, folder = recipe.get("batch"), run.get("dir")
    if recipe.get("microbatch") is not None or recipe.get("microbatches") is not None:
        return
    if type(batch) is not int or not isinstance(folder, str) or run.get("resume", "auto") != "auto":
        return
    recorded = _read_config(FilePath(folder) / _CONFIG)
    if recorded is None:
        return
    before = get_mapping(recorded.values, "recipe")
    if before.get("batch") == batch and before.get("microbatches") == compute_legacy_microbatches(batch):
        recipe["microbatches"] = before["microbatches"]
        document.positions[_KEY] = recorded.positions[_KEY]


def _read_config(file: FilePath) -> Any:
    """Return the parsed config.yaml of a run folder, or None if the file can't be read.

    No error is raised here, because the reason is reported when the run starts.
    """
    try:
        return parse(plainfile.read_bytes(file, _MAX_BYTES).decode(), str(file))
    except (OSError, ValueError):  # ValueError is raised for invalid UTF-8, or for a NUL character in the path
        return None
