"""The layout protocol: how a model is distributed over the ranks, either replicated or sharded in rows of its tensors.

The engine (parallel/data_parallel.py) computes gradients and updates, and its layout decides how they are stored. The
optimizer updates *trained* tensors: the parameters of the model, or this rank's rows of them. An element-wise optimizer
computes the same update for a row on any rank. The layout provides the norms of whole tensors.

Shapes: a whole parameter has R rows (dim 0, or 1 row without dims), this rank has r rows, and ... are all other dims.
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

_GATHERED_BYTES: Final = 32 << 20  # the size of sharded tensors that are gathered at a time


class GradientSum(Protocol):
    """Adds up the gradients of a step over micro-batches and ranks with the tree (core/tree.py)."""

    def begin(self, leaves: int, microbatches: MicroBatches) -> None:
        """Start a step of `leaves` micro-batches over all ranks. This rank computes `microbatches`."""

    def before_backward(self, microbatch: MicroBatch) -> None: ...

    def after_backward(self, microbatch: MicroBatch) -> None: ...

    def finish(self) -> None:
        """Wait for the sums and put them into `grad` of the model's parameters."""


@runtime_checkable
class GathersWeights(Protocol):
    """An additional protocol for layouts that shard parameters and gather them for computation."""

    def gathered_shards(self) -> dict[Tensor, Tensor]:
        """Map each tensor gathered so far to the sharded parameter that it is gathered from.

        A parameter is gathered into the same tensor each time.
        """


@runtime_checkable
class CutsGradients(Protocol):
    """An additional protocol for layouts in which each rank has the whole gradient sum, but keeps only some rows."""

    def keep_whole(self) -> None:
        """Keep the whole gradient sum of each step until its update, for `witnessed`."""

    def witnessed(self) -> Sequence[dict[str, MaybeSharded]]:
        """Return the rows of the whole gradient sum that this rank keeps, and the rows that the next rank keeps."""


class Span(NamedTuple):
    """The rows of a tensor that a rank holds. Of several ranks with the same rows, one is `primary`."""

    rank: int
    first: int
    height: int
    primary: bool


@runtime_checkable
class SpansRows(Protocol):
    """An additional protocol for layouts in rows, which know the rows of every rank."""

    def spans(self, shape: torch.Size) -> Sequence[Span]:
        """Return the rows of a tensor of this shape, by rank. Empty if every rank has the whole tensor."""


class Norms(NamedTuple):
    """Norms of whole tensors, and flags over all ranks. All ranks must call each function in the same way.

    - `all_rows` returns the L2 norms of the rows of all trained tensors. Pass one tensor for each item of
      `Layout.trained`, in the same order. The result is float64 of shape [rows of all tensors], and the same on every
      rank.
    - `of_tensors` returns the norms of whole tensors. Map each trained tensor to this rank's part of the tensor. The
      result is float64 of shape [len(tensors)].
    - `agree_` makes 0-dim flags nonzero on all ranks if they are nonzero on any rank.
    """

    all_rows: Callable[[Sequence[Tensor]], Tensor]
    of_tensors: Callable[[Mapping[Tensor, Tensor]], Tensor]
    agree_: Callable[[Sequence[Tensor]], None]


class Layout(Protocol):
    """The storage of all tensors of a model. All ranks must call the methods in the same order."""

    @property
    def trained(self) -> Sequence[Named]:
        """The tensors that this rank's optimizer updates, in the model's order."""

    @property
    def norms(self) -> Norms:
        """The norms of the trained tensors."""

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """Return `tensor` of shape [r, ...] as rows of the whole tensor of shape [R, ...].

        It must have the shape of the trained tensor of parameter `name`.
        """

    def publish(self) -> None:
        """Copy the trained tensors to the tensors that the model computes with. Call this after an update."""

    def state(self) -> dict[str, MaybeSharded]:
        """Return the model's state, under the names of a single process."""

    def collect(self) -> None:
        """Move the sums from the model's parameters to `grad` of the trained tensors.

        Call this when the sums of a step are complete.
        """

    def reload(self) -> None:
        """Copy the tensors of `state` to the tensors that the model computes with.

        Call this after you write to the tensors of `state`, and after an evaluation, which can leave weights gathered.
        """


# Arguments: the model, a stream that only the layout uses, and the dtype that the model computes in, if it isn't its
# own dtype.
MakeLayout = Callable[[nn.Module, CommStream, torch.dtype | None], tuple[Layout, GradientSum]]


# The norms if each rank has all trained tensors. Then all ranks have the same gradients, and therefore the same flags.
WHOLE: Final = Norms(lambda tensors: torch.cat(row_norms(tensors)), whole_norms, lambda flags: None)


def norms_of_rows(world: World, parts: Mapping[Tensor, Shard], trained: Iterable[Tensor] | None = None) -> Norms:
    """Return the norms of tensors that are sharded in rows. Each rank computes the norms of its own rows for all ranks.

    `parts` has this rank's rows of all trained tensors of the whole model, in the model's order. `trained` has the
    trained tensors of this rank and defaults to all of them. All computation runs on the device of the world, so that
    no rank waits for a GPU, and because a CPU would add in a different order. Tensors in CPU memory are moved to the
    device piece by piece.
    """
    parameters, device = list(parts if trained is None else trained), world.device

    def heights(tensors: Iterable[Tensor]) -> list[int]:
        shapes = [parts[parameter].shape for parameter in tensors]
        return [shape[0] if shape else 1 for shape in shapes]

    def of_rows(tensors: Mapping[Tensor, Tensor]) -> Tensor:
        table = torch.zeros(sum(heights(tensors)), dtype=torch.float64, device=device)
        starts = accumulate(heights(tensors), initial=0)
        offsets = {parameter: start + parts[parameter].first for parameter, start in zip(tensors, starts, strict=False)}
        held_here = [parameter for parameter, tensor in tensors.items() if parts[parameter].primary and tensor.numel()]
        for piece in pieces((parameter, tensors[parameter].nbytes) for parameter in held_here):
            for parameter, norms in zip(
                piece, row_norms([tensors[parameter].to(device) for parameter in piece]), strict=True
            ):
                table[offsets[parameter] : offsets[parameter] + len(norms)] = norms
        return world.add_(table)

    def all_rows(tensors: Sequence[Tensor]) -> Tensor:
        by_parameter = dict(zip(parameters, tensors, strict=True))
        return of_rows({parameter: by_parameter.get(parameter, part.tensor) for parameter, part in parts.items()})

    def of_tensors(tensors: Mapping[Tensor, Tensor]) -> Tensor:
        rows = torch.split(of_rows(tensors), heights(tensors))
        return torch.stack([norm_of_rows(row) for row in rows])

    def agree_(flags: Sequence[Tensor]) -> None:
        for flag in flags:
            world.add_(flag)

    return Norms(all_rows, of_tensors, agree_)


@final
class Slots:
    """The layout of the optimizer's state. A slot with the shape of its parameter is sharded like the parameter."""

    def __init__(self, trained: Sequence[Named], held: Callable[[str, Tensor], MaybeSharded]) -> None:
        """`trained` and `held` are Layout.trained and Layout.as_shard."""
        self.trained = trained
        self._by_name = dict(trained)
        self._held = held

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """Return this rank's tensor `name` (`<parameter>/<slot>`) as a shard if its parameter is sharded."""
        owner = name.rpartition("/")[0]
        parameter = self._by_name.get(owner)
        has_same_shape = parameter is not None and tensor.ndim > 0 and tensor.shape == parameter.shape
        return self._held(owner, tensor) if has_same_shape else tensor

    def own(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of the whole tensor `name`. If it is sharded like its parameter, it is [r, ...]."""
        owner = name.rpartition("/")[0]
        parameter = self._by_name.get(owner)
        if parameter is None:
            return whole
        shard = self._held(owner, parameter)
        return slice_of(whole, shard) if isinstance(shard, Shard) and whole.shape == shard.shape else whole


@torch.no_grad()
def take_over(source: NamedTensors, target: NamedTensors, names: Iterable[str] | None = None) -> None:
    """Copy this rank's part of the whole tensors in `source` to the tensors in `target`.

    Raises UsageError if the names in `source` aren't the names of the model: the names in `target`, or `names` if
    `target` has only some of the model's tensors.
    """
    differing = sorted({*source}.symmetric_difference(target if names is None else names))
    if differing:
        raise UsageError(
            f"the state does not match the model, these tensors differ: {', '.join(differing[:5])}; load the state of "
            f"this model"
        )
    for name, tensor in target.items():
        local_tensor(tensor).copy_(slice_of(local_tensor(source[name]), tensor))


def trainable_parameters(model: nn.Module) -> list[Named]:
    """Return the parameters that require a gradient, in the model's order. Shared parameters have their first name."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def gather_whole(world: World, tensors: NamedTensors) -> dict[str, Tensor]:
    """Return all tensors as whole tensors on every rank. Sharded tensors are gathered on the CPU.

    All ranks must call this in the same way. The tensors must fit into memory. Checkpoints are written without this
    function (training/checkpoint/shards.py).
    """
    shards = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Shard)}
    # Add up one table of bytes for all tensors. Each byte is nonzero on at most one rank. A sum of floats would turn
    # -0.0 into 0.0.
    ends = list(accumulate((_bytes(shard) for shard in shards.values()), initial=0))
    table = torch.zeros(ends[-1], dtype=torch.uint8)
    for start, shard in zip(ends, shards.values(), strict=False):
        if shard.primary and shard.tensor.numel():
            size = shard.tensor.element_size()
            data = shard.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            for run in shard.runs():
                begin = start + run.at * size
                table[begin : begin + run.length * size] = data[run.own * size : (run.own + run.length) * size]
    if shards:
        world.add_(table)
    starts = dict(zip(shards, ends, strict=False))
    return {
        name: _whole(table, starts[name], tensor) if isinstance(tensor, Shard) else tensor.detach()
        for name, tensor in tensors.items()
    }


def wholes(world: World, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors of this rank, then on rank 0 the gathered sharded tensors. All ranks must exhaust it."""
    yield from ((name, tensor) for name, tensor in tensors.items() if not isinstance(tensor, Shard))
    shards = [(name, tensor) for name, tensor in tensors.items() if isinstance(tensor, Shard)]
    # Gather groups of tensors, because one collective per tensor would dominate the time.
    for group in pieces(((item, _bytes(item[1])) for item in shards), _GATHERED_BYTES):
        whole = gather_whole(world, dict(group))
        if world.rank == 0:
            yield from whole.items()


def _whole(table: Tensor, start: int, shard: Shard) -> Tensor:
    data = table[start : start + shard.shape.numel() * shard.tensor.element_size()]
    return data.view(shard.tensor.dtype).reshape(shard.shape)


def _bytes(shard: Shard) -> int:
    """Return the size of the whole tensor, rounded up so that the next tensor is aligned for any dtype."""
    return -(-shard.shape.numel() * shard.tensor.element_size() // 16) * 16
