"""The layout for expert parallelism: each rank has some of the experts, and all other parameters are replicated.

Gradients of replicated parameters are summed as in data parallelism. For the experts, a step has these phases:

1. Ranks run the step in rounds, with one micro-batch per rank in each round. In the backward pass, the rank that holds
   an expert computes a separate gradient of the expert for the micro-batch of each rank (parallel/tensor/experts.py).
2. After each round, the rank adds these gradients to the reduction tree.
3. After the last backward pass, the ranks that hold replicas of the same experts sum their gradients.

Shapes: the parameters of E experts are p_ER..., with E * R rows. This rank has the e * R rows of its e experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from lockstep.comm.canonical import VectorSum, add_
from lockstep.comm.stream import CommStream
from lockstep.comm.world import World
from lockstep.core.mesh import DataRank, Mesh
from lockstep.core.tree import BinaryCounter
from lockstep.device.meta import build_on_meta
from lockstep.errors import UsageError
from lockstep.parallel.gradients import BucketedGradientSum, get_sum_dtype
from lockstep.parallel.layouts.base import GradientSum, Layout, MakeLayout, get_trainable_parameters
from lockstep.parallel.tensor.experts import Dispatcher, Experts
from lockstep.parallel.tensor.slices import (
    ModelSlice,
    SlicedLayout,
    SliceHolder,
    SplitLayer,
    check_distributable,
    find_split_layers,
    keep_rows_of_rank,
    locate_rows,
)
from lockstep.parallel.weights import ReplicatedLayout
from lockstep.tasks.base import MicroBatch, MicroBatches, ModelFactory


def find_expert_layers(model: nn.Module) -> dict[str, SplitLayer]:
    """Return the split layers of the model that contain experts, by module name."""
    layers = find_split_layers(model)
    return {name: layer for name, layer in layers.items() if isinstance(layer.module.forward, Experts)}


def check_experts(build: ModelFactory, ranks: int, strategy: str) -> None:
    """Raise UsageError if the model's groups of experts can't be distributed evenly over `ranks` ranks."""
    _require_expert_layers(build_on_meta(build), ranks, strategy)


def _require_expert_layers(model: nn.Module, ranks: int, strategy: str = "expert") -> dict[str, SplitLayer]:
    """Return the split layers of the model that contain experts, by module name.

    Raises UsageError if the model has split layers but no experts, or if the experts can't be distributed evenly over
    `ranks` ranks.
    """
    experts = find_expert_layers(model)
    if find_split_layers(model) and not experts:
        raise UsageError(
            f"strategy {strategy}: found no known experts in the model; list them in recipe.model.plan "
            f"(docs/model-parallel.md#experts), or use strategy tensor, which splits layers without experts"
        )
    check_distributable(experts, ranks, strategy)
    return experts


def build_expert_slice(build: ModelFactory, world: World, mesh: Mesh) -> nn.Module:
    """Build a model, and keep only the experts of this rank. All ranks must call this function."""
    model, rank = build(), mesh.get_coordinates(world.rank).expert
    layers = _require_expert_layers(model, mesh.expert)
    keep_rows_of_rank(layers.values(), rank, mesh.expert)
    for layer in layers.values():
        experts = layer.module.forward
        assert isinstance(experts, Experts)
        experts.compute_groups = Dispatcher(
            experts, rank, mesh.expert, world.make_carrier(mesh, "expert", side_stream=False)
        )
    return model


def make_expert_layout(world: World, mesh: Mesh, bucket_bytes: int) -> MakeLayout:
    """Return a function that creates the layout of a model that `build_expert_slice` built."""

    def make_layout(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> tuple[Layout, GradientSum]:
        weights, layers = ReplicatedLayout(model, dtype), find_expert_layers(model)
        rank = mesh.get_coordinates(world.rank).expert
        locations = locate_rows(model, layers, rank, mesh.expert)
        other_parameters = [
            (name, parameter) for name, parameter in get_trainable_parameters(model) if name not in locations
        ]
        sums = BucketedGradientSum(
            other_parameters, world.make_canonical_sum(mesh, "replicate", "expert"), stream, False, bucket_bytes
        )
        [step_ranks] = [ranks for ranks in mesh.get_groups("expert") if world.rank in ranks]
        data_ranks = [mesh.get_data_rank(rank_index) for rank_index in step_ranks]
        coordinates = [mesh.get_coordinates(other) for other in range(world.size)]
        holders = [SliceHolder(each.expert, primary=not each.replicate) for each in coordinates]
        expert_slice = ModelSlice(locations, holders, world.rank)
        replica_sum = world.make_canonical_sum(mesh, "replicate", side_stream=False)
        experts = [_make_expert_sums(layer, replica_sum) for layer in layers.values()]
        return SlicedLayout(world, expert_slice, weights), _ExpertGradientSum(sums, experts, data_ranks)

    return make_layout


def _make_expert_sums(layer: SplitLayer, replica_sum: VectorSum) -> "_ExpertSums":
    experts = layer.module.forward
    assert isinstance(experts, Experts)
    assert isinstance(experts.compute_groups, Dispatcher)
    return _ExpertSums(experts.compute_groups, layer.module, replica_sum)


@dataclass(eq=False)
class _ExpertSums:
    """Sums the gradients of a module's experts, separately for each parameter and each rank that has micro-batches."""

    dispatch: Dispatcher
    module: nn.Module
    replica_sum: VectorSum  # sums over the replicas of these experts
    counters: dict[tuple[str, int], BinaryCounter[Tensor]] = field(default_factory=dict)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {
            name: parameter
            for name, parameter in self.module.named_parameters(recurse=False)
            if parameter.requires_grad
        }

    def push(self, indices: Sequence[int | None]) -> None:
        """Add the gradients of a round. `indices` contains the micro-batch index of each rank, or None for a dummy."""
        received = self.dispatch.pop_gradients()
        for rank, index in enumerate(indices):
            if index is None:
                continue
            for name, parameter in self.trained.items():
                gradient = received.get(rank, {}).get(name)
                if gradient is None:
                    gradient = torch.zeros_like(parameter)
                counter = self.counters.setdefault((name, rank), BinaryCounter(add_))
                counter.push(index, gradient.to(get_sum_dtype(parameter)))

    def finish(self, num_microbatches: int) -> None:
        """Store the sums in `grad`. All ranks must call this method."""
        for name, parameter in self.trained.items():
            # The ranks have consecutive micro-batches in a round. Merge their blocks, so that fewer pieces are sent.
            counter: BinaryCounter[Tensor] = BinaryCounter(add_)
            for rank in range(self.dispatch.ranks):
                rank_counter = self.counters.get((name, rank))
                for block, part in rank_counter.pop_pieces().items() if rank_counter is not None else ():
                    counter.add_block(block, part.reshape(-1))
            like = parameter.new_empty(parameter.numel(), dtype=get_sum_dtype(parameter))
            parameter.grad = self.replica_sum(counter.pop_pieces(), num_microbatches, like).view(parameter.shape)


@final
class _ExpertGradientSum:
    """Sums the gradients of experts, and uses `shared_sum` to sum the gradients of all other parameters."""

    def __init__(
        self, shared_sum: GradientSum, expert_sums: Sequence[_ExpertSums], data_ranks: Sequence[DataRank]
    ) -> None:
        self._shared = shared_sum
        self.before_backward = shared_sum.before_backward
        self._experts = expert_sums
        self._data_ranks = data_ranks
        self._leaves = 0
        self._rounds: list[tuple[int | None, ...]] = []

    def begin(self, num_microbatches: int, microbatches: MicroBatches) -> None:
        """See GradientSum."""
        self._shared.begin(num_microbatches, microbatches)
        self._leaves = num_microbatches
        indices_by_rank = [
            [None if dummy else index for index, dummy in data_rank.get_microbatches(num_microbatches)]
            for data_rank in self._data_ranks
        ]
        self._rounds = list(zip(*indices_by_rank, strict=True))[::-1]

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
