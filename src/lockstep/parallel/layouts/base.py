"""How a model is distributed over the ranks: whole on each, or in rows of its tensors.

An engine (parallel/data_parallel.py) computes gradients and updates; where these are is its layout's business. What the
optimizer moves are *trained* tensors: a model's parameters, or this rank's rows of them. Every optimizer that works
element by element does the same to a row wherever it is. What looks at whole tensors, norms, comes from here.

Shapes: R rows of a whole parameter (its dim 0; 1 for one without dims), r of them on this rank, ... its other dims.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from lockstep.comm.stream import CommStream
from lockstep.comm.world import World
from lockstep.core.norm import norm_of_rows, row_norms
from lockstep.core.shard import MaybeSharded, NamedTensors, Shard, local_tensor, slice_of
from lockstep.errors import UsageError
from lockstep.parallel.layerwise import whole_norms
from lockstep.parallel.offloaded import pieces
from lockstep.parallel.optimizer_state import Named
from lockstep.tasks.base import MicroBatch, MicroBatches

_GATHERED_BYTES: Final = 32 << 20  # of cut tensors at a time


class GradientSum(Protocol):
    """Adds a step's gradients over micro-batches and ranks by the tree (core/tree.py)."""

    def begin(self, leaves: int, microbatches: MicroBatches) -> None:
        """Start a step of `leaves` micro-batches, of which this rank computes these."""

    def before_backward(self, microbatch: MicroBatch) -> None: ...

    def after_backward(self, microbatch: MicroBatch) -> None: ...

    def finish(self) -> None:
        """Wait for the sums and leave them in `grad` of the model's parameters."""


@runtime_checkable
class GathersWeights(Protocol):
    """What a Layout has besides that cuts the model's parameters, and puts others in their places to compute."""

    def gathered_shards(self) -> dict[Tensor, Tensor]:
        """Return by what was gathered so far, which is the same tensor each time, what it is gathered of."""


@runtime_checkable
class CutsGradients(Protocol):
    """What a Layout has besides where each rank has the whole sum of the gradients, and keeps some rows of it."""

    def keep_whole(self) -> None:
        """Keep the whole sum of each step until its update, for `witnessed`."""

    def witnessed(self) -> Sequence[dict[str, MaybeSharded]]:
        """Return the rows of a step's whole sum that this rank is to keep, and those that the next one is to."""


class Norms(NamedTuple):
    """What looks at whole tensors, or at those of all ranks, wherever their rows are. All ranks call each alike.

    `all_rows` gives the L2 norm of each row of all that is trained, for tensors in the places of `Layout.trained`, in
    their order: float64 of shape [rows of all tensors], the same on every rank. `of_tensors` gives the norm of each
    whole tensor, of which this rank's part is given by what is trained in that place: float64 of shape [len(tensors)].
    `agree_` makes flags, 0-dim, nonzero on all ranks which are so on one.
    """

    all_rows: Callable[[Sequence[Tensor]], Tensor]
    of_tensors: Callable[[Mapping[Tensor, Tensor]], Tensor]
    agree_: Callable[[Sequence[Tensor]], None]


class Layout(Protocol):
    """Where all of a model's tensors are. All ranks call each method in the same order."""

    @property
    def trained(self) -> Sequence[Named]:
        """What this rank's optimizer moves, in the model's order."""

    @property
    def norms(self) -> Norms:
        """The norms of what is trained."""

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """Return `tensor`, [r, ...] as what is trained of parameter `name` is, as rows of the whole one of [R, ...]."""

    def publish(self) -> None:
        """Call after an update: bring what is trained to where the model computes with it."""

    def state(self) -> dict[str, MaybeSharded]:
        """Return the model's state, under the names of a single process."""

    def collect(self) -> None:
        """Call when a step's sums are complete: bring them from the model's parameters to `grad` of what is trained."""

    def reload(self) -> None:
        """Bring the values of the tensors of `state` to where the model computes with them.

        Call it after they were written, and after an evaluation, which may have left what it gathered.
        """


# Given the model, a stream that is the layout's own, and the dtype in which the model is to compute, if it is another.
MakeLayout = Callable[[nn.Module, CommStream, torch.dtype | None], tuple[Layout, GradientSum]]


# Where each rank has all that is trained. All ranks then have the same gradients, and so the same flags.
WHOLE: Final = Norms(lambda tensors: torch.cat(row_norms(tensors)), whole_norms, lambda flags: None)


def norms_of_rows(world: World, parts: Mapping[Tensor, Shard], trained: Iterable[Tensor] | None = None) -> Norms:
    """Return the norms of tensors that are kept in rows: each rank works out those of its own, for all.

    `parts` says of what is trained in the whole model, in its order, which rows this rank has; what is `trained` on
    this rank is all of it, unless it is given. Everything is worked out on the world's device, so that nobody waits for
    a GPU, and a CPU, which adds up in another order, has no part in it; what is in its memory comes piece by piece.
    """
    own, device = list(parts if trained is None else trained), world.device

    def heights(tensors: Iterable[Tensor]) -> list[int]:
        shapes = [parts[parameter].shape for parameter in tensors]
        return [shape[0] if shape else 1 for shape in shapes]

    def of_rows(tensors: Mapping[Tensor, Tensor]) -> Tensor:
        table = torch.zeros(sum(heights(tensors)), dtype=torch.float64, device=device)
        starts = accumulate(heights(tensors), initial=0)
        places = {parameter: start + parts[parameter].first for parameter, start in zip(tensors, starts, strict=False)}
        held = [each for each, tensor in tensors.items() if parts[each].primary and tensor.numel()]
        for piece in pieces((each, tensors[each].nbytes) for each in held):
            for parameter, norms in zip(piece, row_norms([tensors[each].to(device) for each in piece]), strict=True):
                table[places[parameter] : places[parameter] + len(norms)] = norms
        return world.add_(table)

    def all_rows(tensors: Sequence[Tensor]) -> Tensor:
        given = dict(zip(own, tensors, strict=True))
        return of_rows({each: given.get(each, part.tensor) for each, part in parts.items()})

    def of_tensors(tensors: Mapping[Tensor, Tensor]) -> Tensor:
        rows = torch.split(of_rows(tensors), heights(tensors))
        return torch.stack([norm_of_rows(each) for each in rows])

    def agree_(flags: Sequence[Tensor]) -> None:
        for flag in flags:
            world.add_(flag)

    return Norms(all_rows, of_tensors, agree_)


@final
class Slots:
    """Where the tensors of an optimizer's state are kept: one of its parameter's shape is kept as the parameter is."""

    def __init__(self, trained: Sequence[Named], held: Callable[[str, Tensor], MaybeSharded]) -> None:
        """Take what a layout says is `trained` and how that is `held`."""
        self.trained = trained
        self._by_name = dict(trained)
        self._held = held

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """Return this rank's tensor `name`, which is `<parameter>/<slot>`, as it lies."""
        owner = name.rpartition("/")[0]
        parameter = self._by_name.get(owner)
        lies_alike = parameter is not None and tensor.ndim > 0 and tensor.shape == parameter.shape
        return self._held(owner, tensor) if lies_alike else tensor

    def own(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of the whole tensor `name`: [r, ...] of [R, ...] where it lies as its parameter."""
        owner = name.rpartition("/")[0]
        parameter = self._by_name.get(owner)
        if parameter is None:
            return whole
        held = self._held(owner, parameter)
        return slice_of(whole, held) if isinstance(held, Shard) and whole.shape == held.shape else whole


@torch.no_grad()
def take_over(given: NamedTensors, own: NamedTensors, names: Iterable[str] | None = None) -> None:
    """Write what a state gives, whole, to what this rank has of it.

    UsageError where it has not the tensors of the model: those of `own`, or where these are a part of them, `names`.
    """
    differing = sorted({*given}.symmetric_difference(own if names is None else names))
    if differing:
        raise UsageError(f"the state is that of another model; differing: {', '.join(differing[:5])}")
    for name, held in own.items():
        local_tensor(held).copy_(slice_of(local_tensor(given[name]), held))


def trainable_parameters(model: nn.Module) -> list[Named]:
    """Return the parameters that want a gradient, in the model's order, by the first of their names."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def gather_whole(world: World, tensors: NamedTensors) -> dict[str, Tensor]:
    """Return all tensors whole, on every rank; those that are cut come to the CPU. All ranks call it alike.

    For what fits: a checkpoint goes to the disk without it (training/checkpoint/shards.py).
    """
    shards = {name: held for name, held in tensors.items() if isinstance(held, Shard)}
    # One table of bytes for all, each on one rank and zero on the others: a float's sum would turn -0.0 into 0.0.
    ends = list(accumulate((_bytes(shard) for shard in shards.values()), initial=0))
    table = torch.zeros(ends[-1], dtype=torch.uint8)
    for start, shard in zip(ends, shards.values(), strict=False):
        if shard.primary and shard.tensor.numel():
            size = shard.tensor.element_size()
            own = shard.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            for run in shard.runs():
                begin = start + run.at * size
                table[begin : begin + run.length * size] = own[run.own * size : (run.own + run.length) * size]
    if shards:
        world.add_(table)
    starts = dict(zip(shards, ends, strict=False))
    return {
        name: _whole(table, starts[name], held) if isinstance(held, Shard) else held.detach()
        for name, held in tensors.items()
    }


def wholes(world: World, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Yield what is whole on this rank and, on rank 0, what is cut, gathered. All ranks iterate to the end."""
    yield from ((name, held) for name, held in tensors.items() if not isinstance(held, Shard))
    cut = [(name, held) for name, held in tensors.items() if isinstance(held, Shard)]
    # One collective for each tensor would take most of the time.
    for group in pieces(((each, _bytes(each[1])) for each in cut), _GATHERED_BYTES):
        whole = gather_whole(world, dict(group))
        if world.rank == 0:
            yield from whole.items()


def _whole(table: Tensor, start: int, shard: Shard) -> Tensor:
    own = table[start : start + shard.shape.numel() * shard.tensor.element_size()]
    return own.view(shard.tensor.dtype).reshape(shard.shape)


def _bytes(shard: Shard) -> int:
    """Return the size of the whole, rounded up so that what lies behind it begins where any dtype may begin."""
    return -(-shard.shape.numel() * shard.tensor.element_size() // 16) * 16
