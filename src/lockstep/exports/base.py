"""The interface of an export format, and the source of an export."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from lockstep.core.batch import Inputs
from lockstep.errors import UsageError
from lockstep.inference.saved import SavedModel
from lockstep.models.find import find_origin


@dataclass(frozen=True)
class ExportSource:
    """A saved run and its model, which is on the CPU in evaluation mode, with adapters merged into the weights.

    `inputs` are used to check the export. `model_card` is a JSON-compatible dict with all other information that users
    of the export need.
    """

    saved: SavedModel
    model: nn.Module
    inputs: Inputs
    model_card: Mapping[str, Any]


class Format(Protocol):
    """A module that writes an export format.

    For each format, exports/as_user.py contains a function that loads the export.
    """

    SUFFIX: str  # file name suffix, or empty if the export is a folder
    SAME_KERNELS: bool  # whether a loaded export uses the same kernels as the model of the run

    def check(self, saved: SavedModel) -> None:
        """Raise UsageError if this format doesn't support a run. Called before the model is built."""

    def write(self, export_source: ExportSource, path: Path) -> str:
        """Write the export to `path`, which must not exist yet.

        Return a note for the user, such as the supported input sizes, or an empty string.
        """


def check_origin(saved: SavedModel, library: str) -> None:
    """Raise UsageError if the model of a run doesn't come from `library`."""
    origin = find_origin(saved.recipe.model.name, saved.recipe.model.source)
    if origin != library:
        options = f"--to {origin}, " if origin in ("timm", "transformers") else ""
        raise UsageError(
            f"{saved.path}: {saved.name} is not a {library} model; use {options}--to torch or --to safetensors"
        )
