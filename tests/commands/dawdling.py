"""A model and a loss that keep the other rank waiting until they are let go, in each phase of a run."""

import os
import time
from pathlib import Path
from typing import Any

import held
from torch import Tensor, nn
from torch.nn import functional

from lockstep.training.checkpoint import durable


def until_let(phase: str, rank: str) -> None:
    """Wait on this rank until there is a file of that name."""
    while os.environ.get("RANK") == rank and not Path(phase).exists():
        time.sleep(0.005)


def model(num_classes: int) -> nn.Module:
    """A model of one layer, which rank 1 is late to make, and rank 0 to save."""
    until_let("setting up", "1")
    write = durable.write

    def late(*arguments: Any) -> Any:
        if "checkpoints" in str(arguments[0]):
            until_let("saving", "0")
        return write(*arguments)

    if durable.write.__name__ == "write":
        durable.write = late  # type: ignore[assignment]
    return held.linear(num_classes)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy, which rank 1 is late to evaluate."""
    if not outputs.requires_grad:
        until_let("evaluating", "1")
    return functional.cross_entropy(outputs, targets, reduction="sum")
