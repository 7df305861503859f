"""Sequence parallelism: the ranks that split the features within regions also split the sequences outside regions.

Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models" (arXiv 2205.05198), section
4.2. Outside regions (chunks.py), a rank only computes its own chunks of each sequence. Within regions, it computes its
chunks of features for the full sequence. Therefore the first layers of a region all-gather their inputs, and the last
layer reduce-scatters its outputs: the sum for each chunk of the sequence goes to the rank that holds the chunk. The
backward pass does the opposite.

The following example has two ranks, two chunks of each sequence (A on rank 0, B on rank 1), and two chunks of features
(0 and 1). Each rank has a thread for each chunk of a sequence (parallel/cooperative.py). The thread of the rank's own
chunk runs the forward pass of the model. The thread of the other rank's chunk only *visits* regions: it runs the code
of each region that the forward pass on the other rank enters.

    rank 0, thread A    rank 0, thread B        rank 1, thread A    rank 1, thread B
    ----------------    ----------------        ----------------    ----------------
    norm(A)             waits                   waits               norm(B)
    enter ------------> visit                   visit <------------ enter
    ========= gather: both ranks have the inputs of A and of B, [n, i] each =========
    chunk 0 of A        chunk 0 of B            chunk 1 of A        chunk 1 of B
    ====== reduce-scatter: chunks 0 and 1 are added, for A on rank 0, for B on rank 1 =====
    continues with A    waits                   waits               continues with B

The threads of a rank wait for each other at `=====`, and autograd records one node for all threads. Therefore all ranks
communicate in the same order, including in the backward pass. A forward pass ends with a call of `leave`, which ends
the visits on the other ranks.

The reduction tree computes the same sums as if each rank had all chunks of the sequence, so the bits are the same.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar, final

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lockstep.comm.canonical import CanonicalSum, add_, transfer_tensors
from lockstep.comm.carrier import Carrier
from lockstep.comm.world import World
from lockstep.core.batch import Inputs, call_model
from lockstep.core.mesh import Mesh
from lockstep.core.order import get_subrange
from lockstep.core.tree import LeafBlock, split_into_blocks, sum_pieces
from lockstep.errors import LockstepError, UsageError
from lockstep.parallel.context.exchange import Exchange
from lockstep.parallel.context.sequence_chunks import SequenceChunks, get_argument_names, require_sequence_task
from lockstep.parallel.cooperative import CooperativeScheduler, JointFunction
from lockstep.parallel.tensor.chunks import Region
from lockstep.parallel.tensor.layers import ColumnLinear, RowLinear, align
from lockstep.parallel.tensor.slices import SplitLayer, find_split_layers
from lockstep.parallel.work_units import WorkUnits
from lockstep.tasks.base import MicroBatch, MicroBatches, Problem

T = TypeVar("T")

_KEY: Final = "placement.strategy.sequence_parallel"
_NEXT: Final = "its next region or its end"


def make_sequence_parallel_units(
    mesh: Mesh,
    problem: Problem,
    model: nn.Module,
    num_chunks: int,
    world: World,
    spread_mesh: Mesh,
    scheduler: CooperativeScheduler,
) -> WorkUnits:
    """Return the work units of this rank: one for each chunk of a sequence.

    Sets `sequence_forwards` in all regions of the model. `spread_mesh` is only part of the MakeWorkUnits signature, and
    isn't used. All ranks must call this function with the same arguments.
    """
    coordinate = mesh.get_coordinates(world.rank)
    carrier = world.make_carrier(mesh, "context", side_stream=False) if mesh.context > 1 else None
    local_chunks = get_subrange(num_chunks, mesh.context, coordinate.context)
    exchange = Exchange(num_chunks, coordinate.context, mesh.context, carrier)
    sequences = SequenceChunks(
        require_sequence_task(problem.task), get_argument_names(model), local_chunks, exchange, scheduler
    )
    tensor_sum = world.make_canonical_sum(mesh, "tensor", side_stream=False)
    tensor_carrier = world.make_carrier(mesh, "tensor", side_stream=False)
    forwards = SequenceForwards(
        len(local_chunks), coordinate.tensor, mesh.tensor, tensor_sum, tensor_carrier, scheduler, world.get_generators()
    )
    for layer in find_split_layers(model).values():
        layer.region.sequence_forwards = forwards
    return SequenceParallelUnits(sequences, forwards)


def check_sequence_parallel(model: nn.Module, example: Inputs | None) -> None:
    """Raise UsageError if a model can't use sequence parallelism. The model and `example` are on the meta device."""
    layers = find_split_layers(model)
    for name, layer in layers.items():
        if not isinstance(layer.module, ColumnLinear | RowLinear):
            raise UsageError(
                f"{_KEY}: {name} is split by rows or experts, and its inputs are not gathered; set {name} to whole in "
                f"recipe.model.plan, or don't set sequence_parallel"
            )
    if example is None:
        return
    try:
        with torch.no_grad(), _AttentionCheck(layers.values()):
            call_model(model, example)
    except LockstepError:
        raise
    except Exception:
        # The model reads tensor values, so this can only be checked in training (parallel/cooperative.py).
        return


@final
class _AttentionCheck(TorchFunctionMode):
    """A TorchFunctionMode that raises UsageError if attention is called outside the regions of `layers`."""

    def __init__(self, layers: Iterable[SplitLayer]) -> None:
        super().__init__()
        self._regions = [layer.region for layer in layers]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and not any(region.is_running for region in self._regions):
            raise UsageError(
                f"{_KEY}: the model calls attention outside the layers that recipe.model.chunks splits, where each "
                f"process only holds its own chunks of a sequence; add the attention layers to recipe.model.plan, or "
                f"don't set sequence_parallel"
            )
        return func(*args, **(kwargs or {}))


@final
class SequenceParallelUnits:
    """Work units for all chunks of a sequence. Units for other ranks' chunks are dummies that only visit regions."""

    def __init__(self, sequence_chunks: SequenceChunks, forwards: "SequenceForwards") -> None:
        self.count, self.forward_context = sequence_chunks.count, sequence_chunks.forward_context
        self.inputs, self.evaluation_inputs = sequence_chunks.inputs, sequence_chunks.evaluation_inputs
        self._sequences = sequence_chunks
        self._forwards = forwards

    def units_for(self, microbatch: MicroBatch, microbatches: int) -> MicroBatches:
        """See WorkUnits."""
        leaves = self._sequences.units_for(microbatch, microbatches)
        return [
            replace(unit, is_dummy=number not in self._forwards.local_indices) for number, unit in enumerate(leaves)
        ]

    def loss(self, unit: MicroBatch, compute: Callable[[], T]) -> T | None:
        """See WorkUnits."""
        if unit.is_dummy:
            with self.forward_context():
                self._forwards.visit_regions()
            return None
        loss = compute()
        self._forwards.leave()
        return loss


class _RegionVisit(NamedTuple):
    """A call of a region, with the generator states at its start."""

    region: Region
    call: partial[Any]
    rng_states: Sequence[Tensor]


@final
@dataclass(frozen=True, eq=False)
class SequenceForwards:
    """The forward passes of the `num_forwards` chunks of a sequence, which execute regions together. See ForwardGroup.

    Each of the `num_ranks` ranks has the same number of consecutive chunks, and this rank is `rank`. `canonical_sum`
    gathers tensors from all ranks, and `carrier` sends tensors to them. A single rank doesn't need a carrier.
    """

    num_forwards: int
    rank: int
    num_ranks: int
    canonical_sum: CanonicalSum
    carrier: Carrier | None
    scheduler: CooperativeScheduler
    generators: Sequence[Generator]

    @property
    def local_indices(self) -> range:
        """The indices of the sequence chunks of this rank."""
        return get_subrange(self.num_forwards, self.num_ranks, self.rank)

    @property
    def in_progress(self) -> bool:
        """Whether the forward passes are running. Always False in evaluation, which uses full sequences."""
        return self.scheduler.in_progress

    def enter(self, region: Region, call: partial[Any]) -> None:
        """Announce that a forward pass of this rank calls `region`, so that the other ranks visit it."""
        states = [generator.get_state() for generator in self.generators]
        self.scheduler.exchange(_NEXT, self._share_visits, _RegionVisit(region, call, states))

    def leave(self) -> None:
        """Announce that a forward pass of this rank won't call any more regions."""
        self.scheduler.exchange(_NEXT, self._share_visits, None)

    def visit_regions(self) -> None:
        """Visit all regions that a different rank's forward pass enters, until that rank calls `leave`."""
        while (visit := self.scheduler.exchange(_NEXT, self._share_visits, None)) is not None:
            for generator, state in zip(self.generators, visit.rng_states, strict=True):
                generator.set_state(state.clone())  # torch 2.15 reads past the end of a view with a storage offset
            visit.region.visit(visit.call)

    def exchange(self, label: str, joint_function: JointFunction, inputs: Any) -> Any:
        """See ForwardGroup."""
        return self.scheduler.exchange(label, joint_function, inputs)

    def all_gather(self, local_tensors: Sequence[Tensor]) -> list[Tensor]:
        """See ForwardGroup."""
        return [align(tensor) for tensor in self.canonical_sum.all_gather(torch.stack([*local_tensors])).flatten(0, 1)]

    def reduce_scatter(self, partial_sums: Sequence[Mapping[LeafBlock, Tensor]], num_chunks: int) -> list[Tensor]:
        """See ForwardGroup."""
        own_blocks = [*partial_sums[0]]
        sent, received = [], {}
        for rank in range(self.num_ranks):
            if rank == self.rank:
                continue
            peer_pieces = [
                partial_sums[number][block]
                for number in get_subrange(self.num_forwards, self.num_ranks, rank)
                for block in own_blocks
            ]
            sent.append((torch.stack(peer_pieces), rank))
            block_count = len(split_into_blocks(get_subrange(num_chunks, self.num_ranks, rank)))
            received[rank] = peer_pieces[0].new_empty(len(self.local_indices), block_count, *peer_pieces[0].shape)
        if self.carrier is not None:
            transfer_tensors(self.carrier, sent, [(tensor, rank) for rank, tensor in received.items()])
        return [
            self._sum_pieces(partial_sums[number], received, index, num_chunks)
            for index, number in enumerate(self.local_indices)
        ]

    def _sum_pieces(
        self,
        own_blocks: Mapping[LeafBlock, Tensor],
        received_pieces: Mapping[int, Tensor],
        sum_index: int,
        num_chunks: int,
    ) -> Tensor:
        all_pieces = dict(own_blocks)
        for rank, tensor in received_pieces.items():
            all_pieces |= zip(
                split_into_blocks(get_subrange(num_chunks, self.num_ranks, rank)), tensor[sum_index], strict=True
            )
        return sum_pieces(all_pieces, num_chunks, add_)

    def _share_visits(self, visits_by_forward: Sequence[_RegionVisit | None]) -> Sequence[_RegionVisit | None]:
        """Return the region call of each forward pass, with arguments that are gathered from all ranks."""
        own_visits = [visits_by_forward[number] for number in self.local_indices]
        visits = [visit for visit in own_visits if visit is not None]
        if not visits:
            return visits_by_forward
        first = visits[0]
        if len(visits) < len(own_visits) or any(visit.region is not first.region for visit in visits):
            raise UsageError(
                f"the forward pass of one chunk of a sequence has reached {first.region.name}, but the forward pass of "
                f"another chunk has not; with sequence_parallel, make every chunk go through the same layers in the "
                f"same order"
            )
        flat = [pytree.tree_flatten((visit.call.args, visit.call.keywords, visit.rng_states)) for visit in visits]
        columns = [self._gather_argument(values) for values in zip(*(leaves for leaves, _ in flat), strict=True)]
        all_visits = [*visits_by_forward]
        for number in set(range(self.num_forwards)).difference(self.local_indices):
            inputs, named, states = pytree.tree_unflatten([column[number] for column in columns], flat[0][1])
            all_visits[number] = _RegionVisit(first.region, partial(first.call.func, *inputs, **named), states)
        return all_visits

    def _gather_argument(self, local_values: Sequence[Any]) -> Sequence[Any]:
        """Return one argument of a region call for all forward passes. `local_values` has the arguments on this rank.

        Tensors that require a gradient are replaced by zeros, because a visit only uses their shape.
        """
        first = local_values[0]
        if not isinstance(first, Tensor):
            return [first] * self.num_forwards
        if first.requires_grad:
            return [first.new_zeros(()).expand(first.shape)] * self.num_forwards
        gathered = self.all_gather([tensor.to(self.generators[-1].device) for tensor in local_values])
        return [tensor.to(first.device) for tensor in gathered]
