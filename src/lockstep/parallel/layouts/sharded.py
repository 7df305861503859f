"""The layout for ZeRO stages 2 and 3: parameters, gradients and optimizer state are sharded by rows.

It uses torch's fully_shard: Zhao et al. 2023, "PyTorch FSDP: Experiences on scaling fully sharded data parallel"
(VLDB). A step has these phases:

1. The members of a replica run the step in rounds, with one micro-batch per member in each round. A member without a
   micro-batch in a round computes a dummy micro-batch, because all members take part in gathering the parameters. The
   results of the dummy are discarded.
2. In the backward pass of a round, each member receives its rows of the gradients of all members, and adds them to the
   reduction tree (core/tree.py). Therefore a member never stores the full gradient sums.
3. In the last round, the sums are added over the replicas.

A computation outside a step counts as a round in which no member has a micro-batch.

Shapes: there are M members. The gradients of a unit are g_MN, a flat vector with N elements per member in the layout of
fully_shard (the rows of each parameter are split evenly and padded). This member receives and sums g_N.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lockstep.comm.canonical import CanonicalSum, add_, all_to_all_parts
from lockstep.comm.fsdp import GatherDtype, ShardedModel, compute_rows_per_member, get_local_gradient
from lockstep.comm.stream import CommStream, InlineStream, PendingResult
from lockstep.comm.world import World
from lockstep.common.user_code import make_refusal
from lockstep.core.mesh import DataRank, Mesh
from lockstep.core.shard import MaybeSharded, shard_like
from lockstep.core.tree import BinaryCounter
from lockstep.errors import UsageError
from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.layouts.base import GradientSum, Layout, MakeLayout, RowSpan, make_sharded_norms
from lockstep.parallel.weights import find_fp32_parameters
from lockstep.tasks.base import MicroBatch, MicroBatches, TensorRecorder

# The maximum number of pending communications during the backward pass. They belong to about two units, whose full
# gradients stay in memory.
_MAX_PENDING: Final = 4
# A pending communication can depend on a member that calls its units in a different order, and that waits for an
# all-gather of this member. Therefore stop waiting after this time, and keep more gradients in memory instead.
_MAX_WAIT_S: Final = 10.0


def make_sharded_layout(
    world: World, mesh: Mesh, keep_gathered: bool, offload: bool, num_chunks: int = 1
) -> MakeLayout:
    """Return a function that creates the layout, in which the model is sharded over the members of a replica.

    If `keep_gathered` is set, weights stay gathered between the forward and the backward pass. If `offload` is set, the
    rows are in CPU memory except during use (parallel/offloaded.py). `num_chunks` is the number of chunks that
    sequences are split into. Each rank computes one chunk.
    """

    def make_layout(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> tuple[Layout, GradientSum]:
        # On GPUs, communicate on this thread: NCCL calls are asynchronous, and fully_shard's buffers only support a
        # single stream.
        stream = InlineStream() if world.on_gpu else stream
        layout = ShardedLayout(model, world, mesh, keep_gathered, offload, stream, dtype, num_chunks)
        return layout, layout.gradients

    return make_layout


@final
class ShardedLayout:
    """A layout in which each member of a replica has some rows of the model. Buffers are replicated.

    If `dtype` is set, weights are gathered in this dtype, and the model computes in it.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        mesh: Mesh,
        keep_gathered: bool,
        offload: bool,
        stream: CommStream,
        dtype: torch.dtype | None,
        num_chunks: int = 1,
    ) -> None:
        _check_parameters(model)
        self._world, self._mesh = world, mesh
        rank = mesh.get_data_rank(world.rank)
        self._primary = not (rank.replica or rank.sequence_index)
        units = find_blocks(model)
        _check_dtypes(model, units)
        paths = {module: path for path, module in model.named_modules()}
        names = [*(paths[unit] for unit in units), "the rest of the model"]
        exchange = partial(all_to_all_parts, world.make_carrier(mesh, "shard"), rank.member, rank.num_members)
        replica_sum = world.make_canonical_sum(mesh, "replicate", "context", num_chunks=num_chunks)
        self.gradients = sums = _ShardedGradientSum(rank, exchange, replica_sum, stream, names, num_chunks)
        _check_memory_formats_in_forward(model)
        with torch.no_grad():
            for parameter in model.parameters():  # fully_shard doesn't support other memory formats
                parameter.data = parameter.data.contiguous()
        gather_dtype = None if dtype is None else GatherDtype(dtype, find_fp32_parameters(model, dtype))
        members = world.make_device_mesh(mesh, "shard")
        self._sharded = ShardedModel(model, units, names, members, sums.receive, keep_gathered, offload, gather_dtype)
        sums.model = self._sharded
        self.reload, self.gathered_shards = self._sharded.reshard_all, self._sharded.get_gathered_parameters
        parts = self._sharded.get_trained_shards(self._primary)
        self._shards = {name: shard for name, (shard, _) in parts.items()}
        self.trained = [(name, nn.Parameter(shard.tensor)) for name, shard in self._shards.items()]
        self.norms = make_sharded_norms(world, {parameter: self._shards[name] for name, parameter in self.trained})
        self._gradients = [(parameter, partial(get_local_gradient, parts[name][1])) for name, parameter in self.trained]

    def state(self) -> dict[str, MaybeSharded]:
        """See Layout."""
        return self._sharded.state_dict(self._primary)

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """See Layout."""
        return shard_like(tensor, self._shards[name])

    def spans(self, _name: str, shape: torch.Size) -> Sequence[RowSpan]:
        """See HasRowSpans."""
        row_spans = []
        for rank_index in range(self._world.size):
            data_rank = self._mesh.get_data_rank(rank_index)
            rows_per_member = compute_rows_per_member(shape, data_rank.num_members)
            first = min(data_rank.member * rows_per_member, shape[0])
            num_rows = min(rows_per_member, shape[0] - first)
            row_spans.append(
                RowSpan(rank_index, first, num_rows, primary=not (data_rank.replica or data_rank.sequence_index))
            )
        return row_spans

    def collect(self) -> None:
        """See Layout."""
        self._sharded.copy_sums()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient()
        self._sharded.end_round()

    def publish(self) -> None:
        """See Layout. This is a no-op, because the model gathers its weights from the trained tensors."""


@final
@dataclass(eq=False)
class _ShardedGradientSum:
    """Sums the gradients that fully_shard's backward pass computes. Each member only sums its own rows.

    These operations run concurrently:

    1. In each round, the backward pass on this thread passes the gradients of each unit to `receive`.
    2. The stream scatters these gradients to the members, and adds the received rows to the counter of the unit, in the
       order of the calls to `receive`.
    3. In the last round, once a unit and all units before it in `_order` have been received, the stream also sums the
       rows of the unit over the replicas.

    `_pending` contains the communications that this thread hasn't waited for yet.
    """

    rank: DataRank
    exchange_rows: Callable[[Tensor, int], list[Tensor]]  # calls all_to_all_parts among the members
    replica_sum: CanonicalSum
    stream: CommStream
    units: Sequence[str]
    num_chunks: int
    model: ShardedModel = field(init=False)  # calls `receive`
    _note: TensorRecorder | None = field(default=None, init=False)
    _last_microbatch: MicroBatch | None = field(default=None, init=False)
    _incomplete: deque[int] = field(default_factory=deque, init=False)
    _num_microbatches: int = field(default=0, init=False)
    _first: int = field(default=0, init=False)  # the leaf index of this rank's chunk of micro-batch 0
    _rounds: Iterator[tuple[int, int]] = field(default_factory=lambda: iter(()), init=False)
    _round: tuple[int, int] = field(default=(0, 0), init=False)  # (0, 0) is a round without micro-batches
    _num_remaining: int = field(default=0, init=False)
    _pending: deque[PendingResult[None]] = field(default_factory=deque, init=False)
    _may_block: bool = field(default=True, init=False)
    _outputs: dict[int, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._counters: list[BinaryCounter[Tensor]] = [BinaryCounter(add_) for _ in self.units]
        last = len(self.units) - 1
        self._order = [*reversed(range(last)), last]  # the usual backward order, then the rest of the model

    def begin(self, num_microbatches: int, microbatches: MicroBatches) -> None:
        """See GradientSum."""
        self.model.begin_step()
        self._last_microbatch = microbatches[-1]
        num_whole_microbatches = num_microbatches // self.num_chunks
        rounds, self._first = (
            self.rank.get_rounds(num_whole_microbatches),
            self.rank.sequence_index * num_whole_microbatches,
        )
        self._num_microbatches, self._num_remaining = num_microbatches, len(rounds)
        self._incomplete = deque(self._order)
        self._rounds = iter(rounds)
        self._round = next(self._rounds)

    def before_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._note = microbatch.record_tensor
        self.model.begin_round(is_last=microbatch is self._last_microbatch)

    def after_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self.model.end_backward()
        self._num_remaining -= 1
        self._round = next(self._rounds, (0, 0))
        if microbatch is not self._last_microbatch:
            self.model.end_round()

    def receive(self, unit: int, gradients: Tensor, output: Tensor, may_wait: bool) -> None:
        """Receive a unit's gradients for the M members, [M * N]. In the last round, store the sum, [N], in `output`."""
        if self._note is not None:
            self._note(f"gradient of {self.units[unit]}", gradients)
        while may_wait and self._may_block and len(self._pending) >= _MAX_PENDING:
            try:
                self._pending[0](_MAX_WAIT_S)
                self._pending.popleft()
            except TimeoutError:
                self._may_block = False
        self._pending.append(self.stream.submit(partial(self._push_gradients, unit, *self._round, gradients)))
        if self._num_remaining == 1:
            self._outputs[unit] = output
            self._complete_units(complete_all=False)

    def finish(self) -> None:
        """See GradientSum."""
        self._complete_units(complete_all=True)
        while self._pending:
            self._pending.popleft()()

    def _complete_units(self, complete_all: bool) -> None:
        # Complete units during the backward pass, so that the partial sums and the sums of all units aren't in memory
        # at the same time. All replicas must sum the units in the same order, even if the order of units in their
        # backward passes differs.
        while self._incomplete and (complete_all or self._incomplete[0] in self._outputs):
            unit = self._incomplete.popleft()
            if unit in self._outputs:
                job = partial(self._complete_unit, unit, self._outputs.pop(unit))
                self._pending.append(self.stream.submit(job))

    def _push_gradients(self, unit: int, first_leaf: int, num_holders: int, gradients: Tensor) -> None:
        for number, part in enumerate(self.exchange_rows(gradients, num_holders)):
            self._counters[unit].push(self._first + first_leaf + number, part)

    def _complete_unit(self, unit: int, output: Tensor) -> None:
        pieces = self._counters[unit].pop_pieces()
        output.copy_(self.replica_sum(pieces, self._num_microbatches, output))


def _check_parameters(model: nn.Module) -> None:
    if isinstance(model, nn.ModuleDict | nn.ModuleList):
        raise UsageError(
            f"a {type(model).__name__} has no forward method, so its parameters cannot be gathered; pass a module "
            f"whose forward method calls its submodules, or use strategy ddp or zero1"
        )
    for name, parameter in model.named_parameters():
        if not (parameter.is_contiguous() or _is_channels_last(parameter)):
            raise UsageError(
                f"parameter {name} of shape {list(parameter.shape)} has strides {list(parameter.stride())}, but "
                f"gathered weights are contiguous, and torch may select a different kernel for them; make it "
                f"contiguous in the model with nn.Parameter(tensor.contiguous()), or use strategy ddp or zero1"
            )
    scalars = [name for name, parameter in model.named_parameters() if not parameter.ndim]
    if scalars:
        raise UsageError(
            f"parameter {scalars[0]} has no dims, so it cannot be sharded; use shape (1,) in the model, or use "
            f"strategy ddp or zero1"
        )


def _check_dtypes(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raise UsageError if the trained parameters of a unit, which are gathered together, have different dtypes."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    remaining = dict(names)
    for unit in (*units, model):
        gathered = [parameter for parameter in unit.parameters() if remaining.pop(parameter, None)]
        trained = [parameter for parameter in gathered if parameter.requires_grad]
        for parameter in trained[1:]:
            if parameter.dtype is not trained[0].dtype:
                raise UsageError(
                    f"parameter {names[parameter]} is {_format_dtype(parameter)} and {names[trained[0]]} is "
                    f"{_format_dtype(trained[0])}, but the weights of a block are gathered together; use the same "
                    "dtype, move one of them to a separate block, or use strategy ddp or zero1"
                )


def _format_dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _check_memory_formats_in_forward(model: nn.Module) -> None:
    """Make layers with channels_last weights raise UsageError unless their inputs are channels_last.

    A convolution runs in channels_last if its input or its weight is channels_last. Gathered weights are contiguous, so
    the convolution only runs in channels_last, as in a single process, if its input is channels_last.
    """

    def check(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        [tensor, *_] = inputs
        if isinstance(tensor, Tensor) and tensor.ndim == 4 and tensor.stride(1) != min(tensor.stride()):
            raise make_refusal(
                f"{name} has channels_last weights, but its input is not channels_last",
                "convert the input with tensor.to(memory_format=torch.channels_last), keep the weights contiguous, or "
                "use strategy ddp or zero1",
            )

    for name, module in model.named_modules():
        weights = [weight for weight in module.parameters(recurse=False) if weight.ndim == 4]
        if any(_is_channels_last(weight) and not weight.is_contiguous() for weight in weights):
            module.register_forward_pre_hook(partial(check, name))
