"""What must be equal on all ranks of a run, compared before the data is opened."""

import platform
from typing import Any

import torch

from lockstep import __version__
from lockstep.config.base import values
from lockstep.config.load import Loaded, comparable
from lockstep.config.placement import Placement
from lockstep.device import machine


def recipe_handshake(loaded: Loaded, device: torch.device) -> dict[str, Any]:
    """Return what the ranks of a recipe's run compare once they have joined."""
    recipe, placement = loaded.config.recipe, loaded.config.placement
    return {"recipe": comparable(values(recipe)), **placement_handshake(placement, device, compiled=recipe.compile)}


def placement_handshake(placement: Placement, device: torch.device, compiled: bool) -> dict[str, Any]:
    """Return the parts of the placement, and the installed versions, that must be equal on all ranks."""
    return {
        "placement.strategy": values(placement)["strategy"],
        "placement.affinity": placement.affinity,  # with auto, all ranks exchange where they run
        "placement.backend": placement.backend,
        "placement.audit_every": placement.audit_every,
        "placement.on_corruption": placement.on_corruption,
        "versions": {"lockstep": __version__, "its source": machine.source(), "python": platform.python_version()},
        "versions of the libraries, CPU or threads": machine.numerics(device, compiled=compiled),
    }
