"""The layout protocol: how the tensors of a model are stored on the ranks, either replicated or sharded by rows.

The engine (parallel/data_parallel.py) computes gradients and updates, and its layout determines how tensors are stored.
The optimizer updates *trained* tensors: the parameters of the model, or this rank's rows of the parameters. An
element-wise optimizer computes the same update for a row on any rank. For optimizers that need norms, the layout
provides the norms of full tensors.

Shapes: a full parameter has R rows along dim 0 (a 0-dim parameter has 1 row), this rank has r rows, and `...` stands
for all other dims.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from lockstep.comm.stream import CommStream
from lockstep.comm.world import World
from lockstep.core.norm import compute_row_norms, compute_total_norm
from lockstep.core.shard import MaybeSharded, NamedTensors, Shard, get_local_tensor, select_rows
from lockstep.errors import UsageError
from lockstep.parallel.layerwise import compute_full_norms
from lockstep.parallel.offloaded import group_by_size
from lockstep.parallel.optimizer_state import NamedParameter
from lockstep.tasks.base import MicroBatch, MicroBatches

_GATHERED_BYTES: Final = 32 << 20  # maximum total size of the sharded tensors that are gathered at once


class GradientSum(Protocol):
    """Sums gradients over the micro-batches and ranks of a step, in the order of the reduction tree (core/tree.py)."""

    def begin(self, num_microbatches: int, microbatches: MicroBatches) -> None:
        """Start a step of `num_microbatches` micro-batches over all ranks, of which this rank computes `microbatches`.

        If micro-batches are split into work units, each unit counts as a micro-batch.
        """

    def before_backward(self, microbatch: MicroBatch) -> None:
        """Prepare for the backward pass of `microbatch`."""

    def after_backward(self, microbatch: MicroBatch) -> None:
        """Add the gradients of `microbatch` to the sums. Call this method after its backward pass."""

    def finish(self) -> None:
        """Wait for the gradient sums, and store them in the `grad` of the model's parameters."""


@runtime_checkable
class GathersWeights(Protocol):
    """The additional interface of layouts that shard parameters and gather them to run the model."""

    def gathered_shards(self) -> dict[Tensor, Tensor]:
        """Return a map from each weight gathered so far to its sharded parameter.

        A parameter is always gathered into the same tensor.
        """


@runtime_checkable
class ShardsGradientSums(Protocol):
    """The additional interface of layouts in which ranks compute the full gradient sum, but keep only some rows."""

    def keep_full_gradients(self) -> None:
        """From now on, keep the full gradient sum of each step until its update, so that you can call `witnessed`."""

    def witnessed(self) -> Sequence[dict[str, MaybeSharded]]:
        """Return the rows of the full gradient sum that this rank keeps, and the rows that the next rank keeps."""


class RowSpan(NamedTuple):
    """The rows of a tensor that `rank` holds: `num_rows` rows, starting at row `first`.

    If several ranks hold the same rows, `primary` is set on one of them.
    """

    rank: int
    first: int
    num_rows: int
    primary: bool


@runtime_checkable
class HasRowSpans(Protocol):
    """The additional interface of layouts that shard tensors by rows."""

    def spans(self, name: str, shape: torch.Size) -> Sequence[RowSpan]:
        """Return the rows of parameter `name` on each rank, given its full shape, or [] if it is replicated."""


class NormFunctions(NamedTuple):
    """Functions that compute norms of full tensors, and combine flags across ranks. All ranks must make the same calls.

    - `compute_row_norms` returns the L2 norm of each row of all trained tensors, as float64 of shape [total number of
      rows]. Pass one tensor for each item of `Layout.trained`, in the same order. The result is the same on every rank.
    - `compute_norms` returns L2 norms of full tensors, as float64 of shape [len(tensors)]. Pass a map from trained
      tensors to this rank's rows of the tensors to measure, e.g. of the updates.
    - `sync_flags_` sets 0-dim flags in place to a nonzero value on all ranks if they are nonzero on any rank.
    """

    compute_row_norms: Callable[[Sequence[Tensor]], Tensor]
    compute_norms: Callable[[Mapping[Tensor, Tensor]], Tensor]
    sync_flags_: Callable[[Sequence[Tensor]], None]


class Layout(Protocol):
    """Determines how ranks store the tensors of a model. All ranks must call the methods in the same order."""

    @property
    def trained(self) -> Sequence[NamedParameter]:
        """The tensors that this rank's optimizer updates, in model order."""

    @property
    def norms(self) -> NormFunctions:
        """Functions that compute norms of the trained tensors."""

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """Return `tensor` of shape [r, ...] as a shard of a full tensor of shape [R, ...], or unchanged if replicated.

        `tensor` must have the shape of the trained tensor of parameter `name`.
        """

    def publish(self) -> None:
        """Copy the trained tensors to the tensors that the model computes with. Call this method after an update."""

    def state(self) -> dict[str, MaybeSharded]:
        """Return the model state. The names are the same as in a single process."""

    def collect(self) -> None:
        """Move the gradient sums from the model's parameters to the `grad` of the trained tensors.

        Call this method when the sums of a step are complete.
        """

    def reload(self) -> None:
        """Copy the tensors that `state` returns to the tensors that the model computes with.

        Call this method after you modify the tensors of `state`, and after an evaluation, which can leave weights
        gathered.
        """


# Creates the layout of a model and its gradient sum. Arguments: the model, a stream that only the layout uses, and the
# dtype that the model computes in, or None to compute in the dtype of its weights.
MakeLayout = Callable[[nn.Module, CommStream, torch.dtype | None], tuple[Layout, GradientSum]]


# The norm functions of layouts in which each rank has all trained tensors. All ranks have the same gradients and flags,
# so no communication is necessary.
REPLICATED_NORMS: Final = NormFunctions(
    lambda tensors: torch.cat(compute_row_norms(tensors)), compute_full_norms, lambda flags: None
)


def make_sharded_norms(
    world: World, shards: Mapping[Tensor, Shard], trained: Iterable[Tensor] | None = None
) -> NormFunctions:
    """Return the norm functions for trained tensors that are sharded by rows. Each rank measures its own rows.

    `shards` maps each trained tensor of the full model to this rank's rows, in model order. `trained` contains the
    trained tensors that this rank has, by default all of them. Norms are computed on the device of the world, because a
    CPU and a GPU add in different orders. Tensors in CPU memory are moved to the device in groups.
    """
    parameters, device = list(shards if trained is None else trained), world.device

    def count_rows(tensors: Iterable[Tensor]) -> list[int]:
        shapes = [shards[parameter].shape for parameter in tensors]
        return [shape[0] if shape else 1 for shape in shapes]

    def gather_row_norms(tensors: Mapping[Tensor, Tensor]) -> Tensor:
        table = torch.zeros(sum(count_rows(tensors)), dtype=torch.float64, device=device)
        starts = accumulate(count_rows(tensors), initial=0)
        offsets = {
            parameter: start + shards[parameter].first for parameter, start in zip(tensors, starts, strict=False)
        }
        local_parameters = [
            parameter for parameter, tensor in tensors.items() if shards[parameter].primary and tensor.numel()
        ]
        for piece in group_by_size((parameter, tensors[parameter].nbytes) for parameter in local_parameters):
            for parameter, norms in zip(
                piece, compute_row_norms([tensors[parameter].to(device) for parameter in piece]), strict=True
            ):
                table[offsets[parameter] : offsets[parameter] + len(norms)] = norms
        return world.add_(table)

    def compute_all_row_norms(tensors: Sequence[Tensor]) -> Tensor:
        by_parameter = dict(zip(parameters, tensors, strict=True))
        return gather_row_norms(
            {parameter: by_parameter.get(parameter, part.tensor) for parameter, part in shards.items()}
        )

    def compute_tensor_norms(tensors: Mapping[Tensor, Tensor]) -> Tensor:
        rows = torch.split(gather_row_norms(tensors), count_rows(tensors))
        return torch.stack([compute_total_norm(row) for row in rows])

    def sync_flags_(flags: Sequence[Tensor]) -> None:
        for flag in flags:
            world.add_(flag)

    return NormFunctions(compute_all_row_norms, compute_tensor_norms, sync_flags_)


@final
class OptimizerStateLayout:
    """The layout of the optimizer state. A slot with the same shape as its parameter is sharded like the parameter."""

    def __init__(self, trained: Sequence[NamedParameter], as_shard: Callable[[str, Tensor], MaybeSharded]) -> None:
        """Create the layout of the optimizer state. Pass `Layout.trained` and `Layout.as_shard`."""
        self.trained = trained
        self._by_name = dict(trained)
        self._as_shard = as_shard

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """Return this rank's tensor in slot `name` (`<parameter>/<slot>`) as a shard, or unchanged if replicated."""
        owner = name.rpartition("/")[0]
        parameter = self._by_name.get(owner)
        has_same_shape = parameter is not None and tensor.ndim > 0 and tensor.shape == parameter.shape
        return self._as_shard(owner, tensor) if has_same_shape else tensor

    def select_local_rows(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's rows [r, ...] of the full tensor in slot `name`, or the full tensor if replicated."""
        owner = name.rpartition("/")[0]
        parameter = self._by_name.get(owner)
        if parameter is None:
            return full
        shard = self._as_shard(owner, parameter)
        return select_rows(full, shard) if isinstance(shard, Shard) and full.shape == shard.shape else full


@torch.no_grad()
def load_local_rows(source: NamedTensors, target: NamedTensors, names: Iterable[str] | None = None) -> None:
    """Copy this rank's rows of the full tensors in `source` to the tensors in `target`, in place.

    Raises UsageError unless `source` has exactly the names in `target`. If `target` contains only some tensors of the
    model, pass the names of all tensors of the model as `names`.
    """
    differing = sorted({*source}.symmetric_difference(target if names is None else names))
    if differing:
        raise UsageError(
            f"the state does not match the model: only one of them has {', '.join(differing[:5])}; load the state of "
            f"this model"
        )
    for name, tensor in target.items():
        get_local_tensor(tensor).copy_(select_rows(get_local_tensor(source[name]), tensor))


def get_trainable_parameters(model: nn.Module) -> list[NamedParameter]:
    """Return the named parameters that require a gradient, in model order. Shared parameters have their first name."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def gather_full_tensors(world: World, tensors: NamedTensors) -> dict[str, Tensor]:
    """Return the full tensors on every rank. Sharded tensors are gathered on the CPU.

    All ranks must call this function with the same names, and must have enough memory for all full tensors. Checkpoints
    are written without gathering (training/checkpoint/shards.py).
    """
    shards = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Shard)}
    # All-reduce one table of bytes for all tensors, in which each byte is nonzero on at most one rank. A sum of floats
    # would change -0.0 to 0.0.
    ends = list(accumulate((_padded_nbytes(shard) for shard in shards.values()), initial=0))
    table = torch.zeros(ends[-1], dtype=torch.uint8)
    for start, shard in zip(ends, shards.values(), strict=False):
        if shard.primary and shard.tensor.numel():
            size = shard.tensor.element_size()
            data = shard.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            for run in shard.iterate_segments():
                begin = start + run.offset * size
                table[begin : begin + run.length * size] = data[
                    run.local_offset * size : (run.local_offset + run.length) * size
                ]
    if shards:
        world.add_(table)
    starts = dict(zip(shards, ends, strict=False))
    return {
        name: _extract_full_tensor(table, starts[name], tensor) if isinstance(tensor, Shard) else tensor.detach()
        for name, tensor in tensors.items()
    }


def iterate_full_tensors(world: World, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) pairs: unsharded tensors on all ranks, then gathered tensors only on rank 0.

    All ranks must exhaust the iterator, because gathering is a collective.
    """
    yield from ((name, tensor) for name, tensor in tensors.items() if not isinstance(tensor, Shard))
    shards = [(name, tensor) for name, tensor in tensors.items() if isinstance(tensor, Shard)]
    # Gather several tensors at once, because a collective for each tensor would be slow.
    for group in group_by_size(((item, _padded_nbytes(item[1])) for item in shards), _GATHERED_BYTES):
        whole = gather_full_tensors(world, dict(group))
        if world.rank == 0:
            yield from whole.items()


def _extract_full_tensor(byte_buffer: Tensor, byte_offset: int, shard: Shard) -> Tensor:
    data = byte_buffer[byte_offset : byte_offset + shard.shape.numel() * shard.tensor.element_size()]
    return data.view(shard.tensor.dtype).reshape(shard.shape)


def _padded_nbytes(shard: Shard) -> int:
    """Return the size of the full tensor in bytes, rounded up so that the next tensor is aligned for any dtype."""
    return -(-shard.shape.numel() * shard.tensor.element_size() // 16) * 16
