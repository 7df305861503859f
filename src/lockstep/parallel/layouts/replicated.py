"""The layout of a model that each process has whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from lockstep.comm.stream import CommStream
from lockstep.comm.world import World
from lockstep.core.mesh import Place
from lockstep.core.norm import row_norms
from lockstep.core.shard import Held
from lockstep.parallel.data_parallel import Lay
from lockstep.parallel.gradients import Gradients
from lockstep.parallel.layerwise import whole_norms
from lockstep.parallel.layouts.base import GradientSum, Layout, trained_parameters
from lockstep.parallel.weights import Weights
from lockstep.tasks.base import MicroBatch


def whole(world: World, places: Sequence[Place], bucket_bytes: int) -> Lay:
    """Return what lays a model whole on each of the ranks, which add gradients in buckets of about `bucket_bytes`."""

    def lay(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> Layout:
        weights = Weights(model, dtype)
        gradients = Gradients(trained_parameters(model), world.canonical(places), stream, world.size == 1, bucket_bytes)
        return ReplicatedLayout(weights, gradients)

    return lay


@final
class ReplicatedLayout:
    """Every rank has the whole model and does the whole update."""

    def __init__(self, weights: Weights, gradients: GradientSum) -> None:
        self._weights = weights
        self.gradients: GradientSum = _HandedGradients(gradients, weights)
        self.trained = weights.trained()

    def state(self) -> dict[str, Held]:
        """See Layout."""
        return {**self._weights.state()}

    def held(self, name: str, tensor: Tensor) -> Held:
        """See Layout."""
        return tensor

    def all_row_norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """See Layout."""
        return torch.cat([row_norms(tensor) for tensor in tensors])

    def norms(self, tensors: Mapping[Tensor, Tensor]) -> Tensor:
        """See Layout."""
        return whole_norms(tensors)

    def agree_(self, flags: Sequence[Tensor]) -> None:
        """See Layout."""

    def settle(self) -> None:
        """See Layout."""
        self._weights.publish()

    def reload(self) -> None:
        """See Layout."""
        self._weights.publish()

    def after_evaluation(self) -> None:
        """See Layout."""

    def close(self) -> None:
        """See Layout."""


@final
class _HandedGradients:
    """Sums of the gradients of a model's parameters, brought to the weights that these are copies of."""

    def __init__(self, sums: GradientSum, weights: Weights) -> None:
        self._sums = sums
        self._weights = weights

    def begin(self, leaves: int, microbatches: Sequence[MicroBatch]) -> None:
        """See GradientSum."""
        self._sums.begin(leaves, microbatches)

    def before_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._sums.before_backward(microbatch)

    def after_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._sums.after_backward(microbatch)

    def finish(self) -> None:
        """See GradientSum."""
        self._sums.finish()
        self._weights.hand_gradients()
