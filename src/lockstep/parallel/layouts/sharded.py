"""The layout of ZeRO's second and third stage: parameters, gradients and optimizer state in rows on the ranks.

Zhao et al. 2023, "PyTorch FSDP: Experiences on scaling fully sharded data parallel" (VLDB), on torch's fully_shard. The
members of a replica go through a step in rounds, one micro-batch each. In a round's backward each member is dealt its
rows of all the members' gradients, and adds them by the tree (core/tree.py), so that it never holds more than rows of
sums. After the last round the replicas add theirs. Members without a micro-batch of their own in a round compute
another's along, since parameters are gathered from all; what they find counts for nothing. So does what all compute
beside a step: that is a round in which no member has a micro-batch.

Shapes: M members; a unit's gradients g_MN, flat, with a part of N elements for each member, as fully_shard lays them
out (each parameter's rows even, padded); what is dealt to this one, and summed, g_N.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lockstep.comm.canonical import CanonicalSum, add_, all_to_all_rows
from lockstep.comm.fsdp import Narrow, Sharded, own_gradient
from lockstep.comm.stream import CommStream, InlineStream, Pending
from lockstep.comm.world import World
from lockstep.common.own_code import refusal
from lockstep.core.mesh import DataRank, Mesh
from lockstep.core.shard import MaybeSharded, shard_like
from lockstep.core.tree import Counter
from lockstep.errors import UsageError
from lockstep.parallel.blocks import find_units
from lockstep.parallel.layouts.base import GradientSum, Layout, MakeLayout, norms_of_rows
from lockstep.parallel.weights import fp32_parameters
from lockstep.tasks.base import MicroBatch, MicroBatches, Note

# Exchanges that may wait while backward makes the next unit's gradients: of about two units, whose gradients are whole.
_UNDER_WAY: Final = 4
# A member that calls its units in another order may hand on its gradients only after gathers in which this one takes
# part. So a member that waited for so long waits no more, and keeps more gradients instead.
_PATIENCE_S: Final = 10.0


def fsdp_layout(world: World, mesh: Mesh, keep_gathered: bool, offload: bool, chunks: int = 1) -> MakeLayout:
    """Return what puts a model in rows on the members of this rank's replica.

    With `offload` they are in the memory of the CPU while nothing computes with them (parallel/offloaded.py).
    Sequences are cut into so many `chunks`, of which each rank computes one.
    """

    def make(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> tuple[Layout, GradientSum]:
        # NCCL calls return at once, and fully_shard gives the buffers of one stream only to that.
        stream = InlineStream() if world.on_gpu else stream
        layout = ShardedLayout(model, world, mesh, keep_gathered, offload, stream, dtype, chunks)
        return layout, layout.gradients

    return make


@final
class ShardedLayout:
    """A model of which each member of a replica has some rows, with its buffers whole.

    With `dtype` the rows are gathered in that, and the model computes with what is gathered.
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
        chunks: int = 1,
    ) -> None:
        _check(model)
        rank = mesh.data_rank(world.rank)
        self._primary = not (rank.replica or rank.seat)
        units = find_units(model)
        _check_dtypes(model, units)
        paths = {module: path for path, module in model.named_modules()}
        names = [*(paths[unit] for unit in units), "what is in no block"]
        exchange = partial(all_to_all_rows, world.carrier(mesh, "shard"), rank.member, rank.members)
        across = world.canonical(mesh, "replicate", "context", chunks=chunks)
        self.gradients = sums = _ShardSums(rank, exchange, across, stream, names, chunks)
        _watch_memory_formats(model)
        with torch.no_grad():
            for parameter in model.parameters():  # fully_shard takes no other memory format
                parameter.data = parameter.data.contiguous()
        narrow = None if dtype is None else Narrow(dtype, fp32_parameters(model, dtype))
        members = world.device_mesh(mesh, "shard")
        self._sharded = Sharded(model, units, names, members, sums.receive, keep_gathered, offload, narrow)
        sums.model = self._sharded
        self.reload, self.gathered_shards = self._sharded.scatter, self._sharded.gathered_tensors
        parts = self._sharded.trained_shards(self._primary)
        self._cuts = {name: cut for name, (cut, _) in parts.items()}
        self.trained = [(name, nn.Parameter(cut.tensor)) for name, cut in self._cuts.items()]
        self.norms = norms_of_rows(world, {own: self._cuts[name] for name, own in self.trained})
        self._gradients = [(own, partial(own_gradient, parts[name][1])) for name, own in self.trained]

    def state(self) -> dict[str, MaybeSharded]:
        """See Layout."""
        return self._sharded.state(self._primary)

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """See Layout."""
        return shard_like(tensor, self._cuts[name])

    def collect(self) -> None:
        """See Layout."""
        self._sharded.copy_sums()
        for own, gradient in self._gradients:
            own.grad = gradient()
        self._sharded.end_round()

    def publish(self) -> None:
        """See Layout: what is trained are the very rows that are gathered."""


@final
@dataclass(eq=False)
class _ShardSums:
    """Adds what fully_shard's backward makes, and leaves this member's rows of the sums in the gradients of its shards.

    Three things go on at once. Backward (this thread) hands over a unit's gradients in each round. The stream exchanges
    them among the members and pushes the rows that arrive into the unit's counter, in the order in which they were
    handed over. In the last round, as soon as a unit and all before it in `_order` are handed over, the stream adds
    its rows over the replicas, too. `_under_way` are the exchanges that this thread has not yet waited for.
    """

    rank: DataRank
    deal: Callable[[Tensor, int], list[Tensor]]  # all_to_all_rows, of this member
    across: CanonicalSum
    stream: CommStream
    units: Sequence[str]
    chunks: int
    model: Sharded = field(init=False)  # which hands over to `receive`
    _note: Note | None = field(default=None, init=False)
    _last: MicroBatch | None = field(default=None, init=False)
    _incomplete: deque[int] = field(default_factory=deque, init=False)
    _leaves: int = field(default=0, init=False)
    _first: int = field(default=0, init=False)  # the leaf of this rank's chunk of the first micro-batch
    _rounds: Iterator[tuple[int, int]] = field(default_factory=lambda: iter(()), init=False)
    _round: tuple[int, int] = field(default=(0, 0), init=False)  # of no holders
    _remaining: int = field(default=0, init=False)
    _under_way: deque[Pending[None]] = field(default_factory=deque, init=False)
    _patient: bool = field(default=True, init=False)
    _outputs: dict[int, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._counters: list[Counter[Tensor]] = [Counter(add_) for _ in self.units]
        last = len(self.units) - 1
        self._order = [*reversed(range(last)), last]  # as most backwards go: the rest of the model is last

    def begin(self, leaves: int, microbatches: MicroBatches) -> None:
        """See GradientSum."""
        self.model.begin_step()
        self._last = microbatches[-1]
        of_all = leaves // self.chunks
        rounds, self._first = self.rank.rounds(of_all), self.rank.seat * of_all
        self._leaves, self._remaining = leaves, len(rounds)
        self._incomplete = deque(self._order)
        self._rounds = iter(rounds)
        self._round = next(self._rounds)

    def before_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._note = microbatch.note
        self.model.begin_round(last=microbatch is self._last)

    def after_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self.model.end_backward()
        self._remaining -= 1
        self._round = next(self._rounds, (0, 0))
        if microbatch is not self._last:
            self.model.end_round()

    def receive(self, unit: int, gradients: Tensor, output: Tensor, may_wait: bool) -> None:
        """Take what a unit's backward made, [M * N] (comm/fsdp.py); after the last round `output`, [N], is the sum."""
        if self._note is not None:
            self._note(f"gradient of {self.units[unit]}", gradients)
        while may_wait and self._patient and len(self._under_way) >= _UNDER_WAY:
            try:
                self._under_way[0](_PATIENCE_S)
                self._under_way.popleft()
            except TimeoutError:
                self._patient = False
        self._under_way.append(self.stream.submit(partial(self._push, unit, *self._round, gradients)))
        if self._remaining == 1:
            self._outputs[unit] = output
            self._complete_ready(everything=False)

    def finish(self) -> None:
        """See GradientSum."""
        self._complete_ready(everything=True)
        while self._under_way:
            self._under_way.popleft()()

    def _complete_ready(self, everything: bool) -> None:
        # During backward, so that parts of sums and sums are not there together for all units. The replicas add unit
        # after unit in one order, which is not always that of their backwards.
        while self._incomplete and (everything or self._incomplete[0] in self._outputs):
            unit = self._incomplete.popleft()
            if unit in self._outputs:
                job = partial(self._complete, unit, self._outputs.pop(unit))
                self._under_way.append(self.stream.submit(job))

    def _push(self, unit: int, first: int, holders: int, gradients: Tensor) -> None:
        for number, part in enumerate(self.deal(gradients, holders)):
            self._counters[unit].push(self._first + first + number, part)

    def _complete(self, unit: int, output: Tensor) -> None:
        pieces = self._counters[unit].pieces()
        output.copy_(self.across(pieces, self._leaves, output))


def _check(model: nn.Module) -> None:
    if isinstance(model, nn.ModuleDict | nn.ModuleList):
        raise UsageError(
            f"a {type(model).__name__} has no forward, around which its parameters would be gathered; train a module "
            f"of your own that calls what is in it, or use strategy ddp or zero1"
        )
    for name, parameter in model.named_parameters():
        if not (parameter.is_contiguous() or _channels_last(parameter)):
            raise UsageError(
                f"parameter {name} of shape {list(parameter.shape)} has strides {list(parameter.stride())}; rows of "
                f"weights are contiguous, and torch may take another kernel for them; make it contiguous in the model, "
                f"as with nn.Parameter(tensor.contiguous()), or use strategy ddp or zero1"
            )
    scalars = [name for name, parameter in model.named_parameters() if not parameter.ndim]
    if scalars:
        raise UsageError(
            f"parameter {scalars[0]} has no dim to cut; give it shape (1,) in the model, or use strategy ddp or zero1"
        )


def _check_dtypes(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raise UsageError if trained parameters that are gathered together have several dtypes."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    left = dict(names)
    for unit in (*units, model):
        gathered = [parameter for parameter in unit.parameters() if left.pop(parameter, None)]
        trained = [parameter for parameter in gathered if parameter.requires_grad]
        for parameter in trained[1:]:
            if parameter.dtype is not trained[0].dtype:
                raise UsageError(
                    f"parameter {names[parameter]} is {_dtype_name(parameter)} and {names[trained[0]]} is "
                    f"{_dtype_name(trained[0])}; this strategy gathers the weights of a block together: give them one "
                    f"dtype, move one into a block of its own, or use strategy ddp or zero1"
                )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _channels_last(tensor: Tensor) -> bool:
    return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _watch_memory_formats(model: nn.Module) -> None:
    """Check what layers are given whose weights are channels_last: in rows they are contiguous.

    A convolution is computed in channels_last if its input or its weight is. So with such an input its bits are the
    same, and another input is rejected.
    """

    def check(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        [tensor, *_] = inputs
        if isinstance(tensor, Tensor) and tensor.ndim == 4 and tensor.stride(1) != min(tensor.stride()):
            raise refusal(
                f"{name} has channels_last weights and an input that is not channels_last",
                "convert both, the input by tensor.to(memory_format=torch.channels_last), or neither; or use strategy "
                "ddp or zero1",
            )

    for name, module in model.named_modules():
        weights = [weight for weight in module.parameters(recurse=False) if weight.ndim == 4]
        if any(_channels_last(weight) and not weight.is_contiguous() for weight in weights):
            module.register_forward_pre_hook(partial(check, name))
