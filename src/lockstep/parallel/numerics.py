"""What an engine is told: the part of a recipe that it computes by, and how its optimizer is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.parallel.layerwise import Norms
from lockstep.parallel.optimizer_state import Named
from lockstep.runtime.precision import Precision

# Given what is trained on this rank, and what works out the norms of the whole tensors that it is part of.
MakeOptimizer = Callable[[Sequence[Named], Norms], Optimizer]


@dataclass(frozen=True)
class Numerics:
    """The part of a recipe that an engine computes by, and of the placement what changes its forward, not the bits."""

    microbatches: int
    seed: int = 0
    precision: Precision = "fp32"
    initial_scale: float = 65536.0
    growth_interval: int = 2000
    skip_nonfinite: bool = False
    ema_decay: float | None = None
    channels_last: bool = False
    compile: bool = False
    offload_activations: bool = False
    recompute: int = 0  # every so many blocks, for the strategies that have none of their own

    def laid_out(self, inputs: Tensor) -> Tensor:
        """Return a micro-batch's inputs in the memory format that the model computes in."""
        if self.channels_last and inputs.ndim == 4:
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs
