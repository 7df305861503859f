"""Sequence parallelism: the ranks that share the chunks of regions also split the sequences outside of regions.

Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models" (arXiv 2205.05198), section
4.2. Outside of regions, a rank computes its own chunks of each sequence. In regions, it computes its chunks of features
for all chunks of the sequence. Therefore the first layers of a region gather their inputs from all ranks, and the last
layer reduces the outputs for a chunk of a sequence on the rank that has the chunk. Backward does the opposite.

The following example has two ranks, two chunks of each sequence (A on rank 0, B on rank 1), and two chunks of features
(0 and 1). Each rank has a thread for each chunk of a sequence (parallel/cooperative.py). The thread of the rank's own
chunk runs the forward of the model. The thread of the other rank's chunk *visits* regions: it calls their code on
behalf of the forward on the other rank.

    rank 0, thread A    rank 0, thread B        rank 1, thread A    rank 1, thread B
    ----------------    ----------------        ----------------    ----------------
    norm(A)             waits                   waits               norm(B)
    enter ------------> visit                   visit <------------ enter
    ========= gather: both ranks have the inputs of A and of B, [n, i] each =========
    chunk 0 of A        chunk 0 of B            chunk 1 of A        chunk 1 of B
    ========= scatter: chunks 0 and 1 of A are added on rank 0, those of B on rank 1 ==
    goes on with A      waits                   waits               goes on with B

The threads of a rank wait for each other at `=====`, and autograd records one node for all of them. Therefore all ranks
communicate in the same order, in backward too. To end the visits, a forward calls `leave`, which is an `enter` without
a region.

The tree adds up the sums in the same way as if each rank had all chunks of the sequence, so the bits are the same.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, final

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lockstep.comm.canonical import CanonicalSum, add_, move
from lockstep.comm.carrier import Carrier
from lockstep.comm.world import World
from lockstep.core.batch import Inputs, call
from lockstep.core.mesh import Mesh
from lockstep.core.order import part
from lockstep.core.tree import LeafBlock, blocks, total
from lockstep.errors import LockstepError, UsageError
from lockstep.parallel.context.exchange import Exchange
from lockstep.parallel.context.sequence_chunks import SequenceChunks, argument_names, sequence_task
from lockstep.parallel.cooperative import Cooperative, Joint
from lockstep.parallel.tensor.chunks import Region
from lockstep.parallel.tensor.layers import ColumnLinear, RowLinear, align
from lockstep.parallel.tensor.slices import CutLayer, cut_layers
from lockstep.parallel.work_units import WorkUnits
from lockstep.tasks.base import MicroBatch, MicroBatches, Problem

_KEY: Final = "placement.strategy.sequence_parallel"
_NEXT: Final = "its next region or its end"


def sequence_parallel_leaves(
    slices: Mesh, problem: Problem, model: nn.Module, chunks: int, world: World, mesh: Mesh, together: Cooperative
) -> WorkUnits:
    """Return the work units of this rank. `mesh` is the spread form of `slices` (core/mesh.py).

    Sets `visited` of the model's regions. All ranks must call this in the same way.
    """
    at = slices.coordinate(world.rank)
    carrier = world.carrier(slices, "context", side_stream=False) if slices.context > 1 else None
    local = part(chunks, slices.context, at.context)
    exchange = Exchange(chunks, at.context, slices.context, carrier)
    sequences = SequenceChunks(sequence_task(problem.task), argument_names(model), local, exchange, together)
    across = world.canonical(slices, "tensor", side_stream=False)
    along = world.carrier(slices, "tensor", side_stream=False)
    spread = Spread(len(local), at.tensor, slices.tensor, across, along, together, world.generators())
    for layer in cut_layers(model).values():
        layer.chunks.visited = spread
    return SpreadChunks(sequences, spread)


def check_sequence_parallel(model: nn.Module, example: Inputs | None) -> None:
    """Raise UsageError if a model doesn't support this. The model and its inputs `example` are on the meta device."""
    layers = cut_layers(model)
    for name, layer in layers.items():
        if not isinstance(layer.module, ColumnLinear | RowLinear):
            raise UsageError(
                f"{_KEY}: {name} is split by rows or experts, and its inputs are not gathered; set {name} to whole in "
                f"recipe.model.plan, or don't set sequence_parallel"
            )
    if example is None:
        return
    try:
        with torch.no_grad(), _InRegions(layers.values()):
            call(model, example)
    except LockstepError:
        raise
    except Exception:  # the model reads values: in this case, its first forward raises (parallel/cooperative.py)
        return


@final
class _InRegions(TorchFunctionMode):
    """A context that raises UsageError if torch's attention is called outside of the regions of these layers."""

    def __init__(self, layers: Iterable[CutLayer]) -> None:
        super().__init__()
        self._regions = [layer.chunks for layer in layers]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and not any(chunks.computing for chunks in self._regions):
            raise UsageError(
                f"{_KEY}: the model attends outside of the layers that recipe.model.chunks splits, and there each "
                f"process only has its own chunks of a sequence; split its attention in recipe.model.plan, or don't "
                f"set sequence_parallel"
            )
        return func(*args, **(kwargs or {}))


@final
class SpreadChunks:
    """The work units of all chunks of a sequence. The chunks of other ranks are dummies, which only visit regions."""

    def __init__(self, sequences: SequenceChunks, spread: "Spread") -> None:
        self.count, self.around = sequences.count, sequences.around
        self.inputs, self.evaluation_inputs = sequences.inputs, sequences.evaluation_inputs
        self._sequences = sequences
        self._spread = spread

    def of(self, microbatch: MicroBatch, microbatches: int) -> MicroBatches:
        """See WorkUnits."""
        leaves = self._sequences.of(microbatch, microbatches)
        return [replace(leaf, dummy=number not in self._spread.own) for number, leaf in enumerate(leaves)]

    def loss(self, leaf: MicroBatch, compute: Callable[[], Tensor]) -> Tensor | None:
        """See WorkUnits."""
        if leaf.dummy:
            with self.around():
                self._spread.visit_regions()
            return None
        loss = compute()
        self._spread.leave()
        return loss


class _Visit(NamedTuple):
    """A call of a region, and the initial states of its generators."""

    chunks: Region
    call: partial[Any]
    states: Sequence[Tensor]


@final
@dataclass(frozen=True, eq=False)
class Spread:
    """The forwards of the `count` chunks of a sequence, which go through regions together. This rank has `own`.

    This is rank `rank` of `ranks`. The ranks have the same number of consecutive chunks. A single rank needs no
    carrier.
    """

    count: int
    rank: int
    ranks: int
    across: CanonicalSum
    carrier: Carrier | None
    together: Cooperative
    generators: Sequence[Generator]

    @property
    def own(self) -> range:
        """The indices of this rank's chunks."""
        return part(self.count, self.ranks, self.rank)

    @property
    def under_way(self) -> bool:
        """Whether forwards of chunks are in progress. This isn't the case in evaluation, which uses whole sequences."""
        return self.together.under_way

    def enter(self, chunks: Region, call: partial[Any]) -> None:
        """Announce the call of a region for a forward of this rank, so that the threads of other forwards visit it."""
        states = [each.get_state() for each in self.generators]
        self.together.exchange(_NEXT, self._visits, _Visit(chunks, call, states))

    def leave(self) -> None:
        """Announce that a forward of this rank calls no more regions."""
        self.together.exchange(_NEXT, self._visits, None)

    def visit_regions(self) -> None:
        """Visit all regions that the forward of a different rank calls, until it leaves."""
        while (visit := self.together.exchange(_NEXT, self._visits, None)) is not None:
            for generator, state in zip(self.generators, visit.states, strict=True):
                generator.set_state(state.clone())  # torch 2.15 reads past the end of a view with a storage offset
            visit.chunks.visit(visit.call)

    def exchange(self, place: str, joint: Joint, given: Any) -> Any:
        """See Forwards."""
        return self.together.exchange(place, joint, given)

    def gather(self, own: Sequence[Tensor]) -> list[Tensor]:
        """See Forwards."""
        return [align(each) for each in self.across.side_by_side(torch.stack([*own])).flatten(0, 1)]

    def scatter(self, pieces: Sequence[Mapping[LeafBlock, Tensor]], chunks: int) -> list[Tensor]:
        """See Forwards."""
        own = [*pieces[0]]
        sent, arriving = [], {}
        for rank in range(self.ranks):
            if rank == self.rank:
                continue
            theirs = [pieces[number][block] for number in part(self.count, self.ranks, rank) for block in own]
            sent.append((torch.stack(theirs), rank))
            held = len(blocks(part(chunks, self.ranks, rank)))
            arriving[rank] = theirs[0].new_empty(len(self.own), held, *theirs[0].shape)
        if self.carrier is not None:
            move(self.carrier, sent, [(each, rank) for rank, each in arriving.items()])
        return [self._total(pieces[number], arriving, at, chunks) for at, number in enumerate(self.own)]

    def _total(self, own: Mapping[LeafBlock, Tensor], arriving: Mapping[int, Tensor], at: int, chunks: int) -> Tensor:
        found = dict(own)
        for rank, each in arriving.items():
            found |= zip(blocks(part(chunks, self.ranks, rank)), each[at], strict=True)
        return total(found, chunks, add_)

    def _visits(self, given: Sequence[_Visit | None]) -> Sequence[_Visit | None]:
        """Return the region call for each forward. For forwards of other ranks, use the arguments on these ranks."""
        own = [given[number] for number in self.own]
        visits = [each for each in own if each is not None]
        if not visits:
            return given
        first = visits[0]
        if len(visits) < len(own) or any(each.chunks is not first.chunks for each in visits):
            raise UsageError(
                f"the forward of one chunk of a sequence has reached {first.chunks.name}, but that of another chunk "
                f"has not; with sequence_parallel, make every chunk go through the same layers in the same order"
            )
        flat = [pytree.tree_flatten((each.call.args, each.call.keywords, each.states)) for each in visits]
        columns = [self._of_all(each) for each in zip(*(leaves for leaves, _ in flat), strict=True)]
        found = [*given]
        for number in set(range(self.count)).difference(self.own):
            inputs, named, states = pytree.tree_unflatten([column[number] for column in columns], flat[0][1])
            found[number] = _Visit(first.chunks, partial(first.call.func, *inputs, **named), states)
        return found

    def _of_all(self, own: Sequence[Any]) -> Sequence[Any]:
        """Return an argument of all forwards. If it requires a gradient, only its shape is used: layers gather it."""
        first = own[0]
        if not isinstance(first, Tensor):
            return [first] * self.count
        if first.requires_grad:
            return [first.new_zeros(()).expand(first.shape)] * self.count
        found = self.gather([each.to(self.generators[-1].device) for each in own])
        return [each.to(first.device) for each in found]
