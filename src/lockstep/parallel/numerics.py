"""The arguments of an engine: the numerics of a recipe, and the function that creates the optimizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.core.batch import Inputs, map_tensors
from lockstep.core.engine_recipe import EngineRecipe
from lockstep.core.order import get_subrange
from lockstep.core.shard import ChunkLayout
from lockstep.device.precision import get_compute_dtype, get_weight_dtype, make_loss_scaler
from lockstep.parallel.compiled import compile_blocks
from lockstep.parallel.layerwise import ComputeNorms
from lockstep.parallel.optimizer_state import NamedParameter
from lockstep.parallel.random_relu import forbid_rrelu_with_hooks
from lockstep.parallel.weights import convert_parameters, widen_batchnorm

# Creates the optimizer, given the trained tensors of this rank and the function that computes norms of full tensors.
MakeOptimizer = Callable[[Sequence[NamedParameter], ComputeNorms], Optimizer]


@dataclass(frozen=True)
class Numerics:
    """The recipe of an engine, and placement settings that affect how a step is computed, but not its bits."""

    recipe: EngineRecipe
    offload_activations: bool = False
    # Recompute every n-th block, or none if 0; only for strategies without their own recomputation.
    recompute_interval: int = 0
    checks_writes: bool = True  # whether to raise an error if a forward pass writes to weights or buffers
    averages_weights: bool = True  # whether to average weights if the recipe sets `ema`
    needs_full_tensors: bool = False  # whether to give the optimizer full tensors, although they are sharded or chunked
    # Parameters that the recipe splits into chunks.
    chunked_parameters: Mapping[str, ChunkLayout] = field(default_factory=dict)
    num_peers: int = 1  # number of engines that split the micro-batches of a step, and use different seeds
    peer_index: int = 0  # index of this engine among its peers

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches that this engine computes in a full step."""
        return len(get_subrange(self.recipe.microbatches, self.num_peers, self.peer_index))

    @property
    def largest_microbatch_size(self) -> int:
        """The number of samples in the largest micro-batch."""
        return -(-self.recipe.batch // self.recipe.microbatches)

    @property
    def seed(self) -> int:
        """The random seed of this engine, which differs between peers."""
        return self.recipe.seed + self.peer_index

    @property
    def skip_nonfinite(self) -> bool:
        """Whether to skip a step if its loss or gradient isn't finite."""
        return self.recipe.nonfinite == "skip"

    @property
    def ema_decay(self) -> float | None:
        """The EMA decay, or None if weights aren't averaged."""
        return self.recipe.ema.decay if self.averages_weights and self.recipe.ema else None

    @property
    def channels_last(self) -> bool:
        """Whether the model and its inputs use the channels_last memory format."""
        return self.recipe.memory_format == "channels_last"

    @property
    def sync_batchnorm(self) -> bool:
        """Whether BatchNorm is synchronized over all micro-batches of a step."""
        return self.recipe.batchnorm == "sync"

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that the model computes in, or None if there isn't a single dtype, as with autocast."""
        return get_compute_dtype(self.recipe.precision)

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The dtype in which weights are stored and trained, or None to keep the dtype of the model."""
        return get_weight_dtype(self.recipe.precision)

    @property
    def copy_dtype(self) -> torch.dtype | None:
        """The dtype of the weight copies that the model computes with, or None if it computes with the weights."""
        return self.dtype if self.weight_dtype is None else None

    def prepare_model(self, model: nn.Module, device: torch.device) -> None:
        """Convert a model to the dtypes of the recipe and compile it, in place. Call this before you wrap layers."""
        if self.dtype is not None:
            widen_batchnorm(model)
        if self.weight_dtype is not None:
            convert_parameters(model, self.weight_dtype)
        forbid_rrelu_with_hooks(model)
        if self.recipe.compile:
            compile_blocks(model, device)

    def make_loss_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Return the gradient scaler. It is disabled if the precision doesn't need loss scaling."""
        return make_loss_scaler(self.recipe.precision, self.recipe.loss_scale, device)

    def prepare_inputs(self, inputs: Inputs) -> Inputs:
        """Convert inputs to the compute dtype and the memory format of the model."""
        if self.dtype is None and not self.channels_last:
            return inputs
        prepared: Inputs = map_tensors(self._prepare_tensor, inputs)
        return prepared

    def prepare_outputs(self, outputs: Any) -> Any:
        """Convert model outputs to fp32, because the loss would be too inaccurate in 16 bits."""
        return outputs if self.dtype is None else map_tensors(_widen, outputs)

    def _prepare_tensor(self, tensor: Tensor) -> Tensor:
        if self.dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        if self.channels_last and tensor.ndim == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
