"""The layout of a model that each process has whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from lockstep.core.mesh import Place
from lockstep.core.norm import row_norms
from lockstep.core.shard import Held
from lockstep.parallel.gradients import Gradients
from lockstep.parallel.layerwise import whole_norms
from lockstep.parallel.layout import GradientSum, Layout, trained_parameters
from lockstep.parallel.local import Lay
from lockstep.runtime.lane import Lane
from lockstep.runtime.world import World


def whole(world: World, places: Sequence[Place], bucket_bytes: int) -> Lay:
    """Return what lays a model whole on each of the ranks, which add gradients in buckets of about `bucket_bytes`."""

    def lay(model: nn.Module, lane: Lane) -> Layout:
        gradients = Gradients(trained_parameters(model), world.canonical(places), lane, world.size == 1, bucket_bytes)
        return WholeLayout(model, gradients)

    return lay


@final
class WholeLayout:
    """Every rank has the whole model and does the whole update."""

    def __init__(self, model: nn.Module, gradients: GradientSum) -> None:
        self._model = model
        self.gradients = gradients
        self.trained = trained_parameters(model)

    def state(self) -> dict[str, Held]:
        """See Layout."""
        return {**self._model.state_dict()}

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

    def reload(self) -> None:
        """See Layout."""

    def after_evaluation(self) -> None:
        """See Layout."""

    def close(self) -> None:
        """See Layout."""
