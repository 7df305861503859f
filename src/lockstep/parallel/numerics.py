"""What an engine is given: the part of a recipe that it computes by, and how its optimizer is made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.core.batch import Inputs, map_tensors
from lockstep.core.precision import Precision
from lockstep.device.precision import computing_dtype, loss_scaler, stored_dtype
from lockstep.parallel.compiled import compile_blocks
from lockstep.parallel.layerwise import Norms
from lockstep.parallel.optimizer_state import Named
from lockstep.parallel.weights import store_in, widen_batchnorm

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
    static_scale: float | None = None  # of the loss, in place of one that moves
    skip_nonfinite: bool = False
    ema_decay: float | None = None
    channels_last: bool = False
    compile: bool = False
    sync_batchnorm: bool = False  # BatchNorm is over all micro-batches of a step
    offload_activations: bool = False
    recompute: int = 0  # every so many blocks, for the strategies that have none of their own
    clip_norm: float | None = None  # which `update` is given too
    samples: int = 1  # of the largest micro-batch
    sequence_chunks: int = 1  # into which each sequence is cut
    guarded: bool = True  # whether a buffer that a forward moves is refused

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that all of the model computes in, None where no single one was asked for."""
        return computing_dtype(self.precision)

    @property
    def stored(self) -> torch.dtype | None:
        """The dtype that weights are trained in, None where it is that which the model has."""
        return stored_dtype(self.precision)

    @property
    def copied(self) -> torch.dtype | None:
        """The dtype of the copies of its weights that the model computes with, None where there are none."""
        return self.dtype if self.stored is None else None

    def prepare(self, model: nn.Module, device: torch.device) -> None:
        """Let a model compute and keep its weights by this, before anything is put around its layers: in place."""
        if self.dtype is not None:
            widen_batchnorm(model)
        if self.stored is not None:
            store_in(model, self.stored)
        if self.compile:
            compile_blocks(model, device)

    def loss_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Return what scales the loss; it does nothing where the precision needs none."""
        return loss_scaler(self.precision, device, self.initial_scale, self.growth_interval, self.static_scale)

    def prepare_inputs(self, inputs: Inputs) -> Inputs:
        """Return a micro-batch's inputs in the dtype and the memory format that the model computes in."""
        if self.dtype is None and not self.channels_last:
            return inputs
        prepared: Inputs = map_tensors(self._prepare_tensor, inputs)
        return prepared

    def prepare_outputs(self, outputs: Any) -> Any:
        """Return what the model gave as the loss takes it: added up in 16 bits it would not be worth much."""
        return outputs if self.dtype is None else map_tensors(_widen, outputs)

    def _prepare_tensor(self, tensor: Tensor) -> Tensor:
        if self.dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        if self.channels_last and tensor.ndim == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
