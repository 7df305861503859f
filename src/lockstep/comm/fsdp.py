"""The door to torch's fully_shard (FSDP2), whose reduce-scatter hands gradients to us instead of adding them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any, NoReturn, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultAllocMixin
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lockstep.comm import older_fsdp
from lockstep.comm.gathers import Gathers
from lockstep.comm.peer_errors import translate_peer_errors
from lockstep.common.own_code import refusal
from lockstep.core.shard import MaybeSharded, Shard
from lockstep.errors import UsageError

# Called in backward with the number of a unit, the gradients of its parameters as one flat tensor with a part for each
# member, the flat tensor that the unit's sharded gradients are views of, and whether it may wait for other members: for
# the same units in the same order on all of them.
Receive = Callable[[int, Tensor, Tensor, bool], None]


@dataclass(frozen=True)
class Narrow:
    """The dtype that parameters are gathered in, but for some that are gathered as they are."""

    dtype: torch.dtype
    wide: frozenset[nn.Parameter] = frozenset()


@final
@dataclass(eq=False)
class Sharded:
    """A model whose tensors are cut by rows over the members of `mesh`, unit by unit; what is in no unit is the last.

    A unit's parameters are gathered before its forward and again before its backward, or with `keep_gathered` once for
    both; as `narrow` says, where it is given. Its gradients are in the dtype of the shards. Members may call different
    units in the same forward (comm/gathers.py): the gradients of one that is not called are zeros, as in one process.
    `receive` waits for other members when these are `patience` units behind.
    """

    model: nn.Module
    units: InitVar[Sequence[nn.Module]]
    names: Sequence[str]
    mesh: DeviceMesh
    receive: Receive
    patience: int
    keep_gathered: bool
    offload: InitVar[bool]
    narrow: InitVar[Narrow | None] = None

    def __post_init__(self, units: Sequence[nn.Module], offload: bool, narrow: Narrow | None) -> None:
        model, mesh, keep_gathered = self.model, self.mesh, self.keep_gathered
        self._offloads = offload and mesh.device_type == "cuda"
        self._outputs: dict[int, Tensor] = {}  # of the last backward, with offloading
        self._calls = [0] * (len(units) + 1)
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}
        self._backward = False  # whether a backward of a step is under way
        self._units = [cast(FSDPModule, unit) for unit in (*units, model)]
        self._gathers = Gathers(self._ask, self._gather, self._scatter, self._hand_on, self._check)
        policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
        # What goes into a unit is not converted: in one process there are no units.
        precision = _policy(narrow)
        older, wide = older_fsdp.is_older(), frozenset() if narrow is None else narrow.wide
        for number, unit in enumerate((*units, model)):
            places = older_fsdp.find_parameters(unit, wide) if older else ()
            fully_shard(
                unit, mesh=mesh, reshard_after_forward=not keep_gathered, offload_policy=policy, mp_policy=precision
            )
            if older and (group := _group(self._units[number])) is not None:
                older_fsdp.complete(group, places)
            _add_zeros(self._units[number])
            if not keep_gathered and (group := _group(self._units[number])) is not None:
                group._backward_prefetch = self._prefetch
            self._units[number].set_custom_all_gather(_AllGatherHook(partial(self._gathers.before, number)))
            self._units[number].set_custom_reduce_scatter(_ReduceScatterHook(partial(self._hand, number)))
            self._units[number].set_gradient_divide_factor(1.0)
            self._units[number].set_force_sum_reduction_for_comms(True)
            unit.register_forward_pre_hook(partial(self._count, number), with_kwargs=True)
            # Around fully_shard's own hook, which turns tensors that want a gradient into others.
            unit.register_forward_pre_hook(_before_fully_shard, prepend=True, with_kwargs=True)
            unit.register_forward_pre_hook(_after_fully_shard, with_kwargs=True)
            unit.register_forward_hook(partial(self._own_outputs, number), prepend=True)
            setattr(unit, "__deepcopy__", _no_copy)  # noqa: B010 - it is found here before fully_shard's
        model.register_forward_pre_hook(self._begin_forward, prepend=True)
        model.register_forward_hook(self._end_forward)
        self._parameters = list(model.parameters())  # the shards: while gathered, the model has others in their place
        held = [number for number, unit in enumerate(self._units) if _parameters(unit)]
        self._forwards = sorted(held, key=lambda number: (number + 1) % len(self._units))  # what is in no unit first
        self._whole = False  # all that may be called is gathered
        self._passes = 0  # forwards since the last backward
        self._late = [0] * len(self._units)  # those whose gradients come at the end of a backward
        self._order: list[int] = []  # in which units hand on their gradients, once it is known
        self._due: deque[int] = deque()
        self._handing = False
        self._kept: list[Tensor] = []  # what was passed on late, in a backward
        self._in_order = True  # so far members wanted the same units in backward, one after the other

    def begin_round(self, last: bool) -> None:
        """Call before each backward of a step, and say of the last one that it is."""
        self._backward = True
        self._outputs.clear()
        schedule: Sequence[int] = ()
        if self.keep_gathered:
            self._units[-1].set_reshard_after_backward(last)
        else:
            usual = sorted(self._forwards, reverse=True)
            schedule = self._gathers.begin(f"backward of {self._passes}", usual)
            self._gather(usual[0])  # what is in no block, even where this member called none of the last blocks
        self._whole = self._whole and not last
        # What is called several times, and what nobody wants in backward, is complete at its end.
        self._due.extend(
            unit
            for unit in self._order
            if not self._late[unit] and (schedule.count(unit) == 1 if schedule else self._passes == 1)
        )
        self._hand_on()

    def end_backward(self) -> None:
        """Call when a backward is over: what units gave that were called several times in its forward is complete."""
        if not self.keep_gathered:
            self._gathers.end(called=[int(calls > 0) for calls in self._calls])
            self._in_order = self._in_order and not self._gathers.differed
        for unit in dict.fromkeys((*self._due, *self._order, *sorted(self._waiting))):
            if unit in self._waiting:
                self._pass_on(unit, may_wait=True)
        self._due.clear()
        self._kept.clear()
        self._calls = [0] * len(self._calls)
        self._passes = 0
        self._backward = False

    def end_round(self) -> None:
        """Call after each backward but a step's last one: what reduce-scatter gave out then was no gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def copy_sums(self) -> None:
        """Call when a step's sums are complete: with offloading fully_shard has copied them to the CPU before."""
        for unit, output in self._outputs.items():
            place = 0
            for each in _group(self._units[unit]).fsdp_params:
                if each.sharded_param.requires_grad:
                    rows = output.as_strided(each.sharded_size, each.contiguous_sharded_stride, place)
                    each.sharded_param.grad._local_tensor.copy_(rows)
                    place += each.padded_sharded_param_size.numel()
        self._outputs.clear()

    def scatter(self) -> None:
        """Free what is gathered: it no longer is what the shards are."""
        self._whole = False
        for unit in self._units:
            unit.reshard()

    def state(self, primary: bool) -> dict[str, MaybeSharded]:
        """Return the model's state; `primary` says whether this rank's replica is the one that reports its shards."""
        held = self.model.state_dict().items()
        return {name: self._shard(each, primary) if isinstance(each, DTensor) else each for name, each in held}

    def trained_shards(self, primary: bool) -> dict[str, tuple[Shard, DTensor]]:
        """Return this rank's rows of each parameter that wants a gradient, and the parameter, in the model's order."""
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        return {name: (self._shard(cast(Any, p), primary), cast(Any, p)) for name, p in parameters.items()}

    def gathered_tensors(self) -> dict[Tensor, Tensor]:
        """Return by the whole tensors that the model computes with, as far as they were gathered once, their shards."""
        found = {}
        for group in filter(None, map(_group, self._units)):
            for each in group.fsdp_params:
                if (tensor := getattr(each, "_unsharded_param", None)) is not None:
                    found[tensor] = each.sharded_param
        return found

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        self._passes += torch.is_grad_enabled()
        if not self._whole:
            self._gathers.begin(f"forward, training={module.training}", self._forwards)

    def _end_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._whole:
            return
        schedule = self._gathers.end(kept=self.keep_gathered)
        self._whole = self.keep_gathered
        if not self._order and torch.is_grad_enabled():
            trained = {
                unit for unit in self._forwards if any(each.requires_grad for each in _parameters(self._units[unit]))
            }
            self._order = [unit for unit in dict.fromkeys(reversed(schedule)) if unit in trained]
            # A unit of a model in chunks is called for each of them, and may be gathered once.
            several = [schedule.count(unit) > 1 or calls > 1 for unit, calls in enumerate(self._calls)]
            late = [int(known or more) for known, more in zip(self._late, several, strict=True)]
            self._late = [max(each) for each in zip(*self._ask(late), strict=True)]

    def _count(self, unit: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        self._calls[unit] += 1
        if not self._order and not any(isinstance(e, Tensor) and e.requires_grad for e in tree_leaves((args, kwargs))):
            self._late[unit] = 1  # fully_shard sees by the gradients of what went in that a unit's backward is over

    def _own_outputs(self, unit: int, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        """Return outputs that share no memory with what is freed after a unit's forward, or, to autograd, with others.

        Parameters that a unit returns, or views of them, would be read when they are no longer there. And fully_shard
        gathers a unit's parameters for its backward in a hook of its outputs, which one that is changed in place loses
        if it is a view.
        """
        freed = set()
        if not self.keep_gathered and (group := _group(self._units[unit])) is not None:
            freed = {each._unsharded_param.untyped_storage().data_ptr() for each in group.fsdp_params}
        views = torch.is_grad_enabled()

        def alone(output: Tensor) -> Tensor:
            has_memory = type(output) in (Tensor, nn.Parameter) and output.layout == torch.strided
            if has_memory and output.untyped_storage().data_ptr() in freed:
                return output.clone()
            return cast(Tensor, _Unchanged.apply(output, output.stride())) if views and output._is_view() else output

        return tree_map_only(Tensor, alone, outputs) if views or freed else outputs

    def _hand(self, unit: int, gradients: Tensor, output: Tensor) -> None:
        """Take what a unit's backward made, to be passed on once for each unit and backward.

        fully_shard reduces after the backward of each call. Autograd adds the calls of a unit up itself: of each
        parameter the whole gradient comes after one of them, and zeros after the others.
        """
        if not self._backward:
            raise refusal(
                "a backward that is not step.backward goes through the placed model, whose weights are in rows",
                "give the whole loss to step.backward(mean=loss), once for each micro-batch; for a derivative beside "
                "it use strategy ddp or zero1",
            )
        if self._offloads:
            self._outputs.setdefault(unit, output)
        if unit not in self._waiting:
            self._waiting[unit] = gradients, output  # whose views become the gradients: those of later calls are added
        else:
            _bits(self._waiting[unit][0]).bitwise_or_(_bits(gradients))  # -0.0 + 0.0 would be 0.0
        self._hand_on(unit)

    def _hand_on(self, handed: int | None = None) -> None:
        """Pass on what is complete, unit by unit, and zeros in the turn of units that were not called.

        Where `receive` waits, it is for members that hand on what this one has handed on, or earlier units. What they
        gather before that, this one has gathered: all go through gathers and units in the same order.
        """
        if self._handing:
            return
        self._handing = True
        try:
            while self._due:
                unit = self._due[0]
                if not self._calls[unit]:
                    if not self.keep_gathered:
                        self._gathers.reach(unit)
                    if unit not in self._waiting:
                        _group(self._units[unit]).post_backward()  # which hands zeros
                elif unit not in self._waiting or self._calls[unit] > 1:
                    return
                self._due.popleft()
                if unit != handed:  # fully_shard keeps only what it has handed last
                    self._kept.append(self._waiting[unit][0])
                self._pass_on(unit, self._in_order and not self._gathers.differed)
        finally:
            self._handing = False

    def _pass_on(self, unit: int, may_wait: bool) -> None:
        """Call `receive` on the stream that fully_shard reduces on, which calls the hook there.

        What is added is of that stream's memory then, whenever it comes. Memory of the computing stream would be given
        out to that again as soon as nobody holds it, though the other may not have read it yet.
        """
        group = _group(self._units[unit])
        side, here = group.comm_ctx.reduce_scatter_stream, group.device_handle.current_stream()
        side.wait_stream(here)
        with group.device_handle.stream(side):
            self.receive(unit, *self._waiting.pop(unit), may_wait)
        here.wait_stream(side)

    def _ask(self, numbers: Sequence[int]) -> list[list[int]]:
        answers = [torch.empty(len(numbers), dtype=torch.int64) for _ in range(self.mesh.size())]
        with translate_peer_errors():
            dist.all_gather(answers, torch.tensor(numbers), group=self.mesh.get_group())
        return [each.tolist() for each in answers]

    def _check(self, unit: int, left: Sequence[int]) -> None:
        """Raise UsageError for a unit that others do not gather, or may not before they wait for this member."""
        if unit not in left:
            raise UsageError(
                f"{self.names[unit]} is called more often than in the first forward, and other processes would have "
                f"to gather it for that; call it equally often in each forward, or use strategy zero2, zero1 or ddp"
            )
        if self._too_far(unit, left):
            raise UsageError(
                f"{self.names[unit]} is called in another order than in the first forward, or what comes of "
                f"{self.names[self._due[0]]} is not in the loss; call what is in the model's containers in one order, "
                f"or use strategy zero2, zero1 or ddp"
            )

    def _too_far(self, unit: int, left: Sequence[int]) -> bool:
        """Whether others may wait for what is due of this member before they gather `unit`."""
        later = left[left.index(unit) :]
        return self._in_order and sum(each not in later for each in self._due) > self.patience

    def _gather(self, unit: int) -> None:
        self._units[unit].unshard()

    def _scatter(self, unit: int) -> None:
        self._units[unit].reshard()

    def _prefetch(self) -> None:
        if (left := self._gathers.remaining()) and not self._too_far(left[0], left):
            group = _group(self._units[left[0]])
            group._prefetch_unshard(group, "backward")

    def _shard(self, tensor: DTensor, primary: bool) -> Shard:
        # As torch.chunk cuts: all members have as many rows as the first, but for the last ones.
        height = -(-tensor.shape[0] // self.mesh.size())
        own = tensor._local_tensor.detach()
        return Shard(own, min(self.mesh.get_local_rank() * height, tensor.shape[0]), tensor.shape, primary)


def _policy(narrow: Narrow | None) -> MixedPrecisionPolicy:
    if narrow is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    policy = partial(MixedPrecisionPolicy, narrow.dtype, torch.float32, cast_forward_inputs=False)
    if not narrow.wide or older_fsdp.is_older():
        return policy()
    return policy(param_dtype_override_fn=lambda each: each.dtype if each in narrow.wide else None)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor as it is without shards; all ranks that have a shard of it call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_gradient(parameter: DTensor) -> Tensor:
    """Return this rank's rows of a parameter's gradient."""
    if parameter.grad is None:
        return torch.zeros_like(parameter._local_tensor)
    return cast(DTensor, parameter.grad)._local_tensor


def _no_copy(_memo: object) -> NoReturn:
    raise refusal(
        "a copy of the placed model, whose weights are in rows",
        "copy it before run.place, and read the weights by their full_tensor(); or use strategy ddp or zero1",
    )


def _group(unit: FSDPModule) -> Any:
    """Return what fully_shard has of a unit that has parameters of its own, else None."""
    return unit._get_fsdp_state()._fsdp_param_group


def _parameters(unit: FSDPModule) -> list[Any]:
    group = _group(unit)
    return [] if group is None else [each.sharded_param for each in group.fsdp_params]


def _add_zeros(unit: FSDPModule) -> None:
    """Let what a unit's backward reduces have zeros for parameters that this member did not use, and others may have.

    As set_reduce_scatter_unused_params does, which torch 2.11 does not have.
    """
    if (group := _group(unit)) is None:
        return
    post_backward = group.post_backward

    def with_zeros(*unused: Any) -> None:
        for each in group.fsdp_params:
            parameter = getattr(each, "_unsharded_param", None)  # there is none before it is gathered first
            if parameter is not None and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype, requires_grad=False)
        post_backward(*unused)

    group.post_backward = with_zeros


@final
class _AllGatherHook(DefaultAllGather):
    """Calls `before` ahead of each gather of a unit, which is dist.all_gather_into_tensor, or what this torch has."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._before()
        return super().__call__(output_tensor, input_tensor, group, async_op)


@final
class _ReduceScatterHook(DefaultAllocMixin, ReduceScatter):
    def __init__(self, hand: Callable[[Tensor, Tensor], None]) -> None:
        self._hand = hand

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._hand(input_tensor, output_tensor)
        return None


@final
class _ArgumentLayout:
    """What fully_shard's hook would lose of a unit's arguments, where it makes views of tensors that want a gradient.

    - That several arguments are one tensor: attention, for one, goes another way where key is query. It gets one.
    - The strides of dims of one element, such as the samples of a micro-batch of one, which tell kernels in which
      memory format it is: torch makes strides anew when it makes a view.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        first: dict[int, int] = {}
        self._first = [
            first.setdefault(id(each), n) if isinstance(each, Tensor) else n for n, each in enumerate(leaves)
        ]
        self._strides = [_stride(leaf) for leaf in leaves]

    def once(self, leaves: Sequence[Any]) -> list[Any]:
        return [leaf if self._first[number] == number else None for number, leaf in enumerate(leaves)]

    def restore(self, leaves: Sequence[Any]) -> list[Any]:
        alike = [
            leaf if leaf is None or _stride(leaf) == stride else _Unchanged.apply(leaf, stride)
            for leaf, stride in zip(leaves, self._strides, strict=True)
        ]
        return [alike[number] for number in self._first]


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _before_fully_shard(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Give a unit its arguments without repeated tensors, and at their end what is to be known of them."""
    leaves, tree = tree_flatten((args, kwargs))
    noted = _ArgumentLayout(leaves)
    args, kwargs = cast(Arguments, tree_unflatten(noted.once(leaves), tree))
    return (*args, noted), kwargs


def _after_fully_shard(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Give a unit its arguments as they were."""
    *given, noted = args
    leaves, tree = tree_flatten((tuple(given), kwargs))
    return cast(Arguments, tree_unflatten(noted.restore(leaves), tree))


@final
class _Unchanged(torch.autograd.Function):
    """A tensor with these strides, and its gradient as it is: a view of torch's would make strides of both anew."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
        same = tensor.detach()
        return same if same.stride() == stride else same.as_strided(same.shape, stride)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _stride(value: Any) -> tuple[int, ...] | None:
    return value.stride() if isinstance(value, Tensor) and value.layout == torch.strided else None


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
