"""What an engine is given: the recipe that it computes by, and how its optimizer is made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.core.batch import Inputs, map_tensors
from lockstep.core.engine_recipe import EngineRecipe
from lockstep.core.order import part
from lockstep.device.precision import computing_dtype, loss_scaler, stored_dtype
from lockstep.parallel.compiled import compile_blocks
from lockstep.parallel.layerwise import Norms
from lockstep.parallel.optimizer_state import Named
from lockstep.parallel.weights import store_in, widen_batchnorm

# Given what is trained on this rank, and what works out the norms of the whole tensors that it is part of.
MakeOptimizer = Callable[[Sequence[Named], Norms], Optimizer]


@dataclass(frozen=True)
class Numerics:
    """The recipe that an engine computes by, and the part of the placement that changes its forward, not the bits."""

    recipe: EngineRecipe
    offload_activations: bool = False
    recompute: int = 0  # every so many blocks, for the strategies that have none of their own
    guarded: bool = True  # whether a buffer that a forward moves is refused
    averages: bool = True  # the weights, if the recipe says so
    peers: int = 1  # engines that share the micro-batches of a step and nothing else, each with a seed of its own
    peer: int = 0  # the number of this one

    @property
    def microbatches(self) -> int:
        """The number of micro-batches of a whole step of this engine."""
        return len(part(self.recipe.microbatches, self.peers, self.peer))

    @property
    def largest_microbatch(self) -> int:
        """The samples of the largest micro-batch."""
        return -(-self.recipe.batch // self.recipe.microbatches)

    @property
    def seed(self) -> int:
        """The seed of this engine."""
        return self.recipe.seed + self.peer

    @property
    def skip_nonfinite(self) -> bool:
        """Whether a step whose gradient is not finite moves nothing."""
        return self.recipe.nonfinite == "skip"

    @property
    def ema_decay(self) -> float | None:
        """The decay of the average of the weights, None if there is none."""
        return self.recipe.ema.decay if self.averages and self.recipe.ema else None

    @property
    def channels_last(self) -> bool:
        """Whether the model and its inputs are in that memory format."""
        return self.recipe.memory_format == "channels_last"

    @property
    def sync_batchnorm(self) -> bool:
        """Whether BatchNorm is over all micro-batches of a step."""
        return self.recipe.batchnorm == "sync"

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that all of the model computes in, None where no single one was asked for."""
        return computing_dtype(self.recipe.precision)

    @property
    def stored(self) -> torch.dtype | None:
        """The dtype that weights are trained in, None where it is that which the model has."""
        return stored_dtype(self.recipe.precision)

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
        if self.recipe.compile:
            compile_blocks(model, device)

    def loss_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Return what scales the loss; it does nothing where the precision needs none."""
        return loss_scaler(self.recipe.precision, self.recipe.loss_scale, device)

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
