"""The layout protocol: how a model is distributed over the ranks, either replicated or sharded by rows.

The engine (parallel/data_parallel.py) computes gradients and updates, and its layout determines how they are stored.
The optimizer updates *trained* tensors: the parameters of the model, or this rank's rows of the parameters. An
element-wise optimizer computes the same update for a row on any rank. The layout provides the norms of full tensors.

Shapes: a full parameter has R rows along dim 0 (a 0-dim parameter has 1 row), this rank has r rows, and ... are all
other dims.
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

_GATHERED_BYTES: Final = 32 << 20  # total size of the sharded tensors that are gathered at once


class GradientSum(Protocol):
    """Sums the gradients of a step over micro-batches and ranks in the order of the reduction tree (core/tree.py)."""

    def begin(self, leaves: int, microbatches: MicroBatches) -> None:
        """Start a step with `leaves` micro-batches over all ranks. This rank computes `microbatches`."""

    def before_backward(self, microbatch: MicroBatch) -> None: ...

    def after_backward(self, microbatch: MicroBatch) -> None: ...

    def finish(self) -> None:
        """Wait for the sums, and store them in `grad` of the model's parameters."""


@runtime_checkable
class GathersWeights(Protocol):
    """The additional interface of layouts that shard parameters and gather them for computation."""

    def gathered_shards(self) -> dict[Tensor, Tensor]:
        """Return a map from each tensor that has been gathered so far to its sharded parameter.

        A parameter is gathered into the same tensor each time.
        """


@runtime_checkable
class CutsGradients(Protocol):
    """The additional interface of layouts in which each rank computes the full gradient sum but keeps some rows."""

    def keep_full_gradients(self) -> None:
        """From now on, keep the full gradient sum of each step until its update, for `witnessed`."""

    def witnessed(self) -> Sequence[dict[str, MaybeSharded]]:
        """Return the rows of the full gradient sum that this rank keeps, and the rows that the next rank keeps."""


class Span(NamedTuple):
    """The rows of a tensor that a rank holds. If several ranks hold the same rows, one of these ranks is `primary`."""

    rank: int
    first: int
    height: int
    primary: bool


@runtime_checkable
class SpansRows(Protocol):
    """The additional interface of layouts in rows, which know the rows of every rank."""

    def spans(self, name: str, shape: torch.Size) -> Sequence[Span]:
        """Return the rows of parameter `name`, of full shape `shape`, by rank. Empty if the parameter is replicated."""


class Norms(NamedTuple):
    """Functions for norms of full tensors, and for flags over all ranks. All ranks must make the same calls.

    - `all_rows` returns the L2 norms of the rows of all trained tensors. Pass one tensor for each item of
      `Layout.trained`, in the same order. The result is float64 of shape [rows of all tensors], and the same on every
      rank.
    - `of_tensors` returns the norms of full tensors. Pass a map from trained tensors to this rank's part of the tensors
      to measure. The result is float64 of shape [len(tensors)].
    - `agree_` makes 0-dim flags nonzero on all ranks if they are nonzero on any rank.
    """

    all_rows: Callable[[Sequence[Tensor]], Tensor]
    of_tensors: Callable[[Mapping[Tensor, Tensor]], Tensor]
    agree_: Callable[[Sequence[Tensor]], None]


class Layout(Protocol):
    """Stores all tensors of a model. All ranks must call the methods in the same order."""

    @property
    def trained(self) -> Sequence[Named]:
        """The tensors that this rank's optimizer updates, in model order."""

    @property
    def norms(self) -> Norms:
        """The norms of the trained tensors."""

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """Return `tensor` of shape [r, ...] as rows of a full tensor of shape [R, ...].

        `tensor` must have the shape of the trained tensor of parameter `name`.
        """

    def publish(self) -> None:
        """Copy the trained tensors to the tensors that the model computes with. Call this after an update."""

    def state(self) -> dict[str, MaybeSharded]:
        """Return the model state. The names are the same as on a single process."""

    def collect(self) -> None:
        """Move the gradient sums from the model's parameters to the `grad` of the trained tensors.

        Call this method when the sums of a step are complete.
        """

    def reload(self) -> None:
        """Copy the tensors of `state` to the tensors that the model computes with.

        Call this method after you change the tensors of `state`, and after an evaluation, which can leave weights
        gathered.
        """


# Arguments: the model, a stream that only the layout uses, and the dtype that the model computes in if it differs from
# the dtype of its weights.
MakeLayout = Callable[[nn.Module, CommStream, torch.dtype | None], tuple[Layout, GradientSum]]


# The norms for layouts in which each rank has all trained tensors. In this case, all ranks have the same gradients and
# the same flags.
WHOLE: Final = Norms(lambda tensors: torch.cat(row_norms(tensors)), whole_norms, lambda flags: None)


def norms_of_rows(world: World, parts: Mapping[Tensor, Shard], trained: Iterable[Tensor] | None = None) -> Norms:
    """Return the norms of tensors that are sharded by rows. Each rank computes the norms of its own rows for all ranks.

    `parts` maps all trained tensors of the full model to this rank's rows, in model order. `trained` contains the
    trained tensors of this rank, and defaults to all of them. All computation runs on the device of the world, so that
    no rank waits for a GPU, and because a CPU would add in a different order. Tensors in CPU memory are moved to the
    device in groups.
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
    """The layout of the optimizer state. A slot with the same shape as its parameter is sharded like the parameter."""

    def __init__(self, trained: Sequence[Named], held: Callable[[str, Tensor], MaybeSharded]) -> None:
        """Create the layout of the optimizer state, given Layout.trained and Layout.as_shard."""
        self.trained = trained
        self._by_name = dict(trained)
        self._held = held

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """Return this rank's tensor `name` (`<parameter>/<slot>`) as a shard, or unchanged if it isn't sharded."""
        owner = name.rpartition("/")[0]
        parameter = self._by_name.get(owner)
        has_same_shape = parameter is not None and tensor.ndim > 0 and tensor.shape == parameter.shape
        return self._held(owner, tensor) if has_same_shape else tensor

    def own(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of the full tensor `name`. The shape is [r, ...] if it is sharded."""
        owner = name.rpartition("/")[0]
        parameter = self._by_name.get(owner)
        if parameter is None:
            return whole
        shard = self._held(owner, parameter)
        return slice_of(whole, shard) if isinstance(shard, Shard) and whole.shape == shard.shape else whole


@torch.no_grad()
def take_over(source: NamedTensors, target: NamedTensors, names: Iterable[str] | None = None) -> None:
    """Copy this rank's part of the full tensors in `source` to the tensors in `target`.

    Raises UsageError if `source` doesn't have the names of the model. These are the names in `target`, or `names` if
    `target` contains only some tensors of the model.
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
    """Return the parameters that require a gradient, in model order. Shared parameters have their first name."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def gather_full_tensors(world: World, tensors: NamedTensors) -> dict[str, Tensor]:
    """Return all tensors as full tensors on every rank. Sharded tensors are gathered on the CPU.

    All ranks must call this function with the same names. The tensors must fit into memory. Checkpoints are written
    without this function (training/checkpoint/shards.py).
    """
    shards = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Shard)}
    # Sum one table of bytes for all tensors, in which each byte is nonzero on at most one rank. A sum of floats would
    # change -0.0 to 0.0.
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
    """Yield unsharded tensors on all ranks, then gathered tensors on rank 0. All ranks must exhaust the iterator."""
    yield from ((name, tensor) for name, tensor in tensors.items() if not isinstance(tensor, Shard))
    shards = [(name, tensor) for name, tensor in tensors.items() if isinstance(tensor, Shard)]
    # Gather tensors in groups, because one collective per tensor would be slow.
    for group in pieces(((item, _bytes(item[1])) for item in shards), _GATHERED_BYTES):
        whole = gather_full_tensors(world, dict(group))
        if world.rank == 0:
            yield from whole.items()


def _whole(table: Tensor, start: int, shard: Shard) -> Tensor:
    data = table[start : start + shard.shape.numel() * shard.tensor.element_size()]
    return data.view(shard.tensor.dtype).reshape(shard.shape)


def _bytes(shard: Shard) -> int:
    """Return the size of the full tensor, rounded up so that the next tensor is aligned for any dtype."""
    return -(-shard.shape.numel() * shard.tensor.element_size() // 16) * 16
