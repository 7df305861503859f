"""The layout of a model whose experts are dealt out: of these each rank has its groups, and all else whole.

What all ranks have is added as by data parallelism. The gradients of experts come from the ranks that use them
(parallel/tensor/dispatch.py), one micro-batch of each rank in a round, and are added by the rank that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from lockstep.comm.canonical import add_
from lockstep.comm.stream import CommStream
from lockstep.comm.world import World
from lockstep.core.mesh import DataRank, Mesh
from lockstep.core.tree import Block, Counter, total
from lockstep.parallel.gradients import Gradients, summed_dtype
from lockstep.parallel.layouts.base import GradientSum, Layout, MakeLayout, trained_parameters
from lockstep.parallel.layouts.replicated import ReplicatedLayout
from lockstep.parallel.tensor.dispatch import Dispatch
from lockstep.parallel.tensor.experts import Experts
from lockstep.parallel.tensor.slices import CutLayer, Slice, SlicedLayout, cut_layers, keep_part, places
from lockstep.parallel.weights import Weights
from lockstep.tasks.base import MicroBatch


def expert_layers(model: nn.Module) -> dict[str, CutLayer]:
    """Return the modules of experts that are cut into groups, by name."""
    layers = cut_layers(model)
    return {name: layer for name, layer in layers.items() if isinstance(layer.module.forward, Experts)}


def own_experts(build: Callable[[], nn.Module], world: World, mesh: Mesh) -> nn.Module:
    """Build a model, of whose experts a rank keeps its own. All ranks call it."""
    model, rank = build(), mesh.coordinate(world.rank).expert
    layers = expert_layers(model)
    keep_part(layers.values(), rank, mesh.expert)
    for layer in layers.values():
        experts = layer.module.forward
        assert isinstance(experts, Experts)
        experts.make = Dispatch(experts, rank, mesh.expert, world.carrier(mesh, "expert", beside=False))
    return model


def dispatched(world: World, mesh: Mesh, bucket_bytes: int) -> MakeLayout:
    """Return what lays out a model that `own_experts` built."""

    def make(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> tuple[Layout, GradientSum]:
        weights, layers = Weights(model, dtype), expert_layers(model)
        rank = mesh.coordinate(world.rank).expert
        cut = places(model, layers, rank, mesh.expert)
        shared = [(name, parameter) for name, parameter in trained_parameters(model) if name not in cut]
        sums = Gradients(shared, world.canonical(mesh, "expert"), stream, False, bucket_bytes)
        data_ranks = [mesh.data_rank(rank) for rank in range(mesh.expert)]
        layout = SlicedLayout(world, Slice(cut, rank), ReplicatedLayout(weights))
        return layout, _ExpertGradients(sums, [_sums_of(layer) for layer in layers.values()], data_ranks)

    return make


def _sums_of(layer: CutLayer) -> _Sums:
    experts = layer.module.forward
    assert isinstance(experts, Experts)
    assert isinstance(experts.make, Dispatch)
    return _Sums(experts.make, layer.module)


@dataclass(eq=False)
class _Sums:
    """The sums of the gradients of a module's experts: by name, and by the rank whose micro-batches they are of."""

    dispatch: Dispatch
    module: nn.Module
    counters: dict[tuple[str, int], Counter[Tensor]] = field(default_factory=dict)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: each for name, each in self.module.named_parameters(recurse=False) if each.requires_grad}

    def push(self, indices: Sequence[int | None]) -> None:
        """Take what a round made for the micro-batches with these numbers, by rank; None is a dummy's."""
        taken = self.dispatch.taken()
        for rank, index in enumerate(indices):
            if index is None:
                continue
            for name, parameter in self.trained.items():
                gradient = taken.get(rank, {}).get(name)
                if gradient is None:
                    gradient = torch.zeros_like(parameter)
                counter = self.counters.setdefault((name, rank), Counter(add_))
                counter.push(index, gradient.to(summed_dtype(parameter)))

    def finish(self, leaves: int) -> None:
        """Leave the sums in the gradients."""
        pieces: dict[str, dict[Block, Tensor]] = {name: {} for name in self.trained}
        for (name, _), counter in self.counters.items():
            pieces[name] |= counter.pieces()
        for name, parameter in self.trained.items():
            parameter.grad = total(pieces[name], leaves, add_)


@final
class _ExpertGradients:
    """Adds the gradients of the experts, and by `shared` those of all else."""

    def __init__(self, shared: GradientSum, experts: Sequence[_Sums], data_ranks: Sequence[DataRank]) -> None:
        self._shared = shared
        self._experts = experts
        self._data_ranks = data_ranks
        self._leaves = 0
        self._rounds: list[tuple[int | None, ...]] = []

    def begin(self, leaves: int, microbatches: Sequence[MicroBatch]) -> None:
        """See GradientSum."""
        self._shared.begin(leaves, microbatches)
        self._leaves = leaves
        dealt = [[None if dummy else index for index, dummy in each.indices(leaves)] for each in self._data_ranks]
        self._rounds = list(zip(*dealt, strict=True))[::-1]

    def before_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._shared.before_backward(microbatch)

    def after_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._shared.after_backward(microbatch)
        indices = self._rounds.pop()
        for sums in self._experts:
            sums.push(indices)

    def finish(self) -> None:
        """See GradientSum."""
        self._shared.finish()
        for sums in self._experts:
            sums.finish(self._leaves)
