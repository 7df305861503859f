"""Keeps the defaults of earlier Lockstep versions for runs that began with these versions.

The config.yaml in a run folder contains every value. If the default of a key has changed since the run began, and the
recipe doesn't set this key, the run resumes with its original value.
"""

from pathlib import Path as FilePath
from typing import Any, Final

from lockstep.common import plainfile
from lockstep.config.document import Document, Path, mapping_at, parse
from lockstep.core.work import earlier_microbatches

_CONFIG: Final = "config.yaml"
_MAX_BYTES: Final = 1 << 18  # bytes
_KEY: Final[Path] = ("recipe", "microbatches")


def keep_earlier_defaults(document: Document) -> None:
    """Set `recipe.microbatches` in `document` to the saved value if the resumed run began with the earlier default."""
    recipe, run = mapping_at(document.values, "recipe"), mapping_at(document.values, "run")
    batch, folder = recipe.get("batch"), run.get("dir")
    if recipe.get("microbatch") is not None or recipe.get("microbatches") is not None:
        return
    if type(batch) is not int or not isinstance(folder, str) or run.get("resume", "auto") != "auto":
        return
    recorded = _read_config(FilePath(folder) / _CONFIG)
    if recorded is None:
        return
    before = mapping_at(recorded.values, "recipe")
    if before.get("batch") == batch and before.get("microbatches") == earlier_microbatches(batch):
        recipe["microbatches"] = before["microbatches"]
        document.positions[_KEY] = recorded.positions[_KEY]


def _read_config(file: FilePath) -> Any:
    """Return the document in a run folder's config.yaml, or None if it can't be read.

    In this case, the start of the run reports the reason later.
    """
    try:
        return parse(plainfile.content(file, _MAX_BYTES).decode(), str(file))
    except (OSError, ValueError):  # ValueError: not UTF-8, or a path with a NUL character
        return None
