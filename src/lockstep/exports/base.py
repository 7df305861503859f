"""What is exported, and what a format is to the rest."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from lockstep.core.batch import Inputs
from lockstep.errors import UsageError
from lockstep.inference.saved import SavedModel
from lockstep.models.find import origin_of


@dataclass(frozen=True)
class ExportSource:
    """A saved run and its model: on the CPU, in evaluation, its adapters merged into the weights.

    `inputs` are those that the export is checked with. `model_card` is what users need to know besides the
    weights, ready for JSON.
    """

    saved: SavedModel
    model: nn.Module
    inputs: Inputs
    model_card: Mapping[str, Any]


class Format(Protocol):
    """A module that writes a format: `write`, and what is true of what it writes.

    exports/as_user.py has a function of the format's name, which loads it back.
    """

    SUFFIX: str  # of the file; "" is a folder
    SAME_KERNELS: bool  # whether whoever loads it computes with the kernels of the run's own model

    def check(self, saved: SavedModel) -> None:
        """Raise UsageError where a run cannot be written so; called before its model is built."""

    def write(self, subject: ExportSource, place: Path) -> str:
        """Write it to `place`, which is not there; return what is to be said of it, such as which sizes it takes."""


def check_origin(saved: SavedModel, library: str) -> None:
    """Raise UsageError where a run's model is not one of a library."""
    origin = origin_of(saved.recipe.model.name, saved.recipe.model.source)
    if origin != library:
        to = f"--to {origin}, " if origin in ("timm", "transformers") else ""
        raise UsageError(f"{saved.path}: {saved.name} is not a {library} model; use {to}--to torch or --to safetensors")
