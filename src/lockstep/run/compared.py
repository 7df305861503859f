"""What has to be the same on all ranks of a run, as far as it is known before the data is opened."""

from __future__ import annotations

import platform
from typing import Any

import torch

from lockstep import __version__
from lockstep.config.base import values
from lockstep.config.load import Loaded, comparable
from lockstep.config.placement import Placement
from lockstep.device import machine


def started_with(loaded: Loaded, device: torch.device) -> dict[str, Any]:
    """Return what ranks compare when they have met, of a run of a recipe."""
    recipe, placement = loaded.config.recipe, loaded.config.placement
    return {"recipe": comparable(values(recipe)), **placed_with(placement, device, compiled=recipe.compile)}


def placed_with(placement: Placement, device: torch.device, compiled: bool) -> dict[str, Any]:
    """Return what of the placement, and of what is installed, has to be the same on all ranks."""
    return {
        "placement.strategy": values(placement)["strategy"],
        "placement.affinity": placement.affinity,  # with auto, all ranks exchange where they run
        "placement.backend": placement.backend,
        "placement.audit_every": placement.audit_every,
        "versions": {"lockstep": __version__, "its source": machine.source(), "python": platform.python_version()},
        "versions of the libraries, CPU or threads": machine.numerics(device, compiled=compiled),
    }
