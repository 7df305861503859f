"""The layout of ZeRO's first stage: the model whole on each rank, and of each tensor some rows to update.

Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models", section 5.1. Each rank
keeps the optimizer's state for its rows alone; after an update the ranks send each other the rows they moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, final

import torch
from torch import Tensor, nn

from lockstep.core.mesh import Place
from lockstep.core.order import part
from lockstep.core.shard import Held, Shard, alike
from lockstep.parallel.gradients import Gradients
from lockstep.parallel.layout import GradientSum, Layout, RowNorms, add_flags_, trained_parameters
from lockstep.parallel.local import Lay
from lockstep.runtime.lane import Lane
from lockstep.runtime.world import World
from lockstep.tasks.base import MicroBatch

_GATHERED_BYTES: Final = 32 << 20  # sent at a time, so that all of a model is not there twice


def rows(world: World, places: Sequence[Place], bucket_bytes: int, offload: bool) -> Lay:
    """Return what lays a model whole on each of several ranks, with a share of each tensor's rows to update.

    With `offload` those rows and the optimizer's state for them are in the memory of the CPU, which does the update.
    """

    def lay(model: nn.Module, lane: Lane) -> Layout:
        parameters = [parameter for _, parameter in trained_parameters(model)]
        gradients = Gradients(parameters, world.canonical(places), lane, world.size == 1, bucket_bytes)
        return RowLayout(model, gradients, world, offload)

    return lay


@final
class RowLayout:
    """Rank r has the r-th even cut of the rows of each parameter; one without dims is every rank's."""

    def __init__(self, model: nn.Module, gradients: GradientSum, world: World, offload: bool) -> None:
        self._model = model
        self._world = world
        self._whole = trained_parameters(model)
        self._cuts = {name: self._cut(parameter) for name, parameter in self._whole}
        self.trained = [
            (name, nn.Parameter(cut.tensor.to("cpu", copy=True) if offload else cut.tensor))
            for name, cut in self._cuts.items()
        ]
        self._offload = offload
        parts: dict[Tensor, Shard] = {own: self._cuts[name] for name, own in self.trained}
        self._norms = RowNorms(world, parts)
        self.gradients: GradientSum = _RowGradients(gradients, self._whole, self.trained, self._cuts)

    def state(self) -> dict[str, Held]:
        """See Layout."""
        return {**self._model.state_dict()}

    def held(self, name: str, tensor: Tensor) -> Held:
        """See Layout."""
        return alike(tensor, self._cuts[name]) if self._cuts[name].shape else tensor

    def all_row_norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """See Layout."""
        return self._norms.of_rows({own: tensor for (_, own), tensor in zip(self.trained, tensors, strict=True)})

    def norms(self, tensors: Mapping[Tensor, Tensor]) -> Tensor:
        """See Layout."""
        return self._norms.of_tensors(tensors)

    def agree_(self, flags: Sequence[Tensor]) -> None:
        """See Layout."""
        add_flags_(self._world, flags)

    @torch.no_grad()
    def reload(self) -> None:
        """See Layout."""
        if self._offload:
            for name, trained in self.trained:
                trained.copy_(self._cuts[name].tensor)

    def after_evaluation(self) -> None:
        """See Layout."""

    @torch.no_grad()
    def settle(self) -> None:
        """Send all ranks the rows that this one moved, and take theirs."""
        if self._offload:
            for name, trained in self.trained:
                self._cuts[name].tensor.copy_(trained)
        for parameters in self._in_bunches():
            lengths = [sum(self._rows(p, rank).numel() for p in parameters) for rank in range(self._world.size)]
            own = torch.cat([self._rows(p, self._world.rank).reshape(-1) for p in parameters])
            for rank, arrived in enumerate(self._world.gather(own, lengths)):
                if rank != self._world.rank:
                    targets = [self._rows(p, rank) for p in parameters]
                    pieces = torch.split(arrived, [target.numel() for target in targets])
                    for target, piece in zip(targets, pieces, strict=True):
                        target.copy_(piece.view(target.shape))

    def close(self) -> None:
        """See Layout."""

    def _in_bunches(self) -> Iterator[list[Tensor]]:
        bunch: list[Tensor] = []
        size = 0
        for _, parameter in self._whole:
            if not parameter.ndim:
                continue
            if bunch and (bunch[0].dtype != parameter.dtype or size >= _GATHERED_BYTES):
                yield bunch
                bunch, size = [], 0
            bunch.append(parameter.detach())
            size += parameter.numel() * parameter.element_size()
        if bunch:
            yield bunch

    def _cut(self, parameter: Tensor) -> Shard:
        if not parameter.ndim:
            return Shard(parameter.detach(), 0, parameter.shape, primary=self._world.rank == 0)
        first = part(len(parameter), self._world.size, self._world.rank).start
        return Shard(self._rows(parameter.detach(), self._world.rank), first, parameter.shape)

    def _rows(self, parameter: Tensor, rank: int) -> Tensor:
        own = part(len(parameter), self._world.size, rank)
        return parameter[own.start : own.stop]


@final
class _RowGradients:
    """Sums of whole gradients, of which this rank's rows are kept."""

    def __init__(
        self,
        whole: GradientSum,
        parameters: Sequence[tuple[str, nn.Parameter]],
        trained: Sequence[tuple[str, nn.Parameter]],
        cuts: Mapping[str, Shard],
    ) -> None:
        self._whole = whole
        self._pairs = [
            (parameter, own, cuts[name]) for (name, parameter), (_, own) in zip(parameters, trained, strict=True)
        ]

    def begin(self, leaves: int, microbatches: Sequence[MicroBatch]) -> None:
        """See GradientSum."""
        self._whole.begin(leaves, microbatches)

    def before_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._whole.before_backward(microbatch)

    def after_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._whole.after_backward(microbatch)

    def finish(self) -> None:
        """See GradientSum."""
        self._whole.finish()
        for parameter, own, cut in self._pairs:
            assert parameter.grad is not None
            gradient = parameter.grad[cut.first : cut.first + len(own)] if cut.shape else parameter.grad
            own.grad = gradient.to(own.device, copy=True)  # so that the rest is free while the optimizer works
            parameter.grad = None
