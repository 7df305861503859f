"""The door to torch's fully_shard (FSDP2), whose reduce-scatter hands gradients to us instead of adding them."""

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
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lockstep.comm import grad_dtype, older_fsdp
from lockstep.comm.gathers import CALL_THE_MODEL, CALLED_ALONE, Gathers
from lockstep.comm.gradient_queue import GradientQueue
from lockstep.comm.peer_errors import translate_peer_errors
from lockstep.comm.unit_calls import UnitCalls
from lockstep.comm.unit_outputs import own_outputs
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
    When a unit's backward is complete (comm/unit_calls.py) its gradients are handed to `receive`, in an order that is
    the same on all members (comm/gradient_queue.py).
    """

    model: nn.Module
    units: InitVar[Sequence[nn.Module]]
    names: Sequence[str]
    mesh: DeviceMesh
    receive: Receive
    keep_gathered: bool
    offload: InitVar[bool]
    narrow: InitVar[Narrow | None] = None

    def __post_init__(self, units: Sequence[nn.Module], offload: bool, narrow: Narrow | None) -> None:
        model, mesh, keep_gathered = self.model, self.mesh, self.keep_gathered
        self._offloads = offload and mesh.device_type == "cuda"
        self._outputs: dict[int, Tensor] = {}  # of the last backward, with offloading
        self._calls = UnitCalls(len(units) + 1)
        self._forwards_under_way = 0
        self._counts_parameters = False  # whether their hooks are there
        self._backward = False  # whether a backward of a step is under way
        self._graph_task = -1  # autograd's number of it
        self._units = [cast(FSDPModule, unit) for unit in (*units, model)]
        self._gradients = GradientQueue(
            self.names, self._calls.is_under_way, self._make_zeros, self._pass_on, self._may_wait
        )
        self._gathers = Gathers(partial(_ask, mesh), self._gather, self._scatter, self._gradients.advance, self._check)
        policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
        # What goes into a unit is not converted: in one process there are no units.
        precision = _policy(narrow)
        older, wide = older_fsdp.is_older(), frozenset() if narrow is None else narrow.wide
        for number, unit in enumerate((*units, model)):
            places = older_fsdp.find_parameters(unit, wide) if older else ()
            fully_shard(
                unit, mesh=mesh, reshard_after_forward=not keep_gathered, offload_policy=policy, mp_policy=precision
            )
            sharded, group = self._units[number], _group(self._units[number])
            if older and group is not None:
                older_fsdp.complete(group, places)
            if group is not None:
                grad_dtype.keep_computed_dtype(group)
            _add_zeros(sharded)
            sharded.set_custom_all_gather(_AllGatherHook(partial(self._gathers.before, number)))
            sharded.set_custom_reduce_scatter(_ReduceScatterHook(partial(self._hand, number)))
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            if group is not None:
                if not keep_gathered:
                    group._backward_prefetch = self._prefetch
                group._register_post_backward_hook = _leave_inputs
                group.pre_backward = partial(self._before_backward, number, group.pre_backward)
            if unit is not model:
                unit.register_forward_pre_hook(partial(self._before_unit, number), prepend=True)
            unit.register_forward_hook(partial(self._after_unit, number), prepend=True, with_kwargs=True)
            setattr(unit, "__deepcopy__", _no_copy)  # noqa: B010 - it is found here before fully_shard's
        if keep_gathered:
            self._units[-1].set_reshard_after_backward(False)
        self._frees = False  # whether weights that stay gathered for a step are freed after this backward
        model.register_forward_pre_hook(self._begin_forward, prepend=True)
        model.register_forward_hook(self._end_forward)
        self._parameters = list(model.parameters())  # the shards: while gathered, the model has others in their place
        held = [number for number, unit in enumerate(self._units) if _parameters(unit)]
        self._forwards = sorted(held, key=lambda number: (number + 1) % len(self._units))  # what is in no unit first
        self._whole = False  # all that may be called is gathered
        self._in_order = True  # so far members wanted the same units in backward, one after the other

    def begin_step(self) -> None:
        """Call before the first forward of a step: what was called since the last backward has no part in the next."""
        self._calls.forget_calls()

    def begin_round(self, last: bool) -> None:
        """Call before each backward of a step, and say of the last one that it is."""
        self._backward = True
        self._outputs.clear()
        self._frees = self.keep_gathered and last
        if not self.keep_gathered:
            usual = sorted(self._forwards, reverse=True)
            self._gathers.begin(f"backward of {self._calls.passes}", usual)
            self._gather(usual[0])  # what is in no block, even where this member called none of the last blocks
        self._whole = self._whole and not last
        if self._calls.several_threads:
            self._count_parameters()
        self._gradients.begin()

    def end_backward(self) -> None:
        """Call when a backward is over: every unit is complete."""
        self._calls.end_backward()
        if not self.keep_gathered:
            self._gathers.end(called=self._calls.called())
            self._in_order = self._in_order and not self._gathers.differed
        self._gradients.end()
        _check_gradients(self._units, self.names)
        if self._frees:  # not unit by unit: nodes of a weight that is used outside of its unit would read freed memory
            for module in self._units:
                module.reshard()
        self._gradients.clear()
        self._calls.clear()
        self._backward = False
        self._graph_task = -1

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
        return {name: _shard(each, self.mesh, primary) if isinstance(each, DTensor) else each for name, each in held}

    def trained_shards(self, primary: bool) -> dict[str, tuple[Shard, DTensor]]:
        """Return this rank's rows of each parameter that wants a gradient, and the parameter, in the model's order."""
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        return {name: (_shard(cast(Any, p), self.mesh, primary), cast(Any, p)) for name, p in parameters.items()}

    def gathered_tensors(self) -> dict[Tensor, Tensor]:
        """Return by the whole tensors that the model computes with, as far as they were gathered once, their shards."""
        found = {}
        for group in filter(None, map(_group, self._units)):
            for each in group.fsdp_params:
                if (tensor := getattr(each, "_unsharded_param", None)) is not None:
                    found[tensor] = each.sharded_param
        return found

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        if _in_backward():  # recomputed
            return
        self._forwards_under_way += 1
        if torch.is_grad_enabled():
            self._calls.begin_forward()
        if not self._whole:
            self._gathers.begin(f"forward, training={module.training}", self._forwards)

    def _end_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if _in_backward():
            return
        self._forwards_under_way -= 1
        if self._whole:
            return
        schedule = self._gathers.end(kept=self.keep_gathered)
        self._whole = self.keep_gathered
        if not self._gradients.order and torch.is_grad_enabled():
            trained = {
                unit for unit in self._forwards if any(each.requires_grad for each in _parameters(self._units[unit]))
            }
            self._gradients.order = [unit for unit in reversed(list(dict.fromkeys(schedule))) if unit in trained]

    def _before_unit(self, unit: int, module: nn.Module, inputs: Any) -> None:
        if _in_backward():
            return
        if not self._forwards_under_way:
            raise refusal(f"{self.names[unit]} {CALLED_ALONE}", CALL_THE_MODEL)
        # autocast keeps the casts of weights that a call without a gradient makes first, and the nodes of these casts:
        # they are older than those of the later call, and autograd comes to them after all units in between.
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self.mesh.device_type):
            self._calls.begin_call(unit)

    def _after_unit(self, unit: int, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        freed = set()
        if not self.keep_gathered and (group := _group(self._units[unit])) is not None:
            freed = {each._unsharded_param.untyped_storage().data_ptr() for each in group.fsdp_params}
        outputs = own_outputs(outputs, (args, kwargs), freed)
        if torch.is_grad_enabled():
            notify: Callable[[Tensor], None] = self._check_graph_task
            if unit != len(self._units) - 1 and not _in_backward():
                notify = partial(self._reach, self._calls.end_call())
            for output in tree_leaves(outputs):
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(notify)  # type: ignore[no-untyped-call]  # before fully_shard's: it gathers
        return outputs

    def _reach(self, call: int, gradient: Tensor) -> None:
        """Complete the units that were first called after this call: its output has its gradient."""
        self._check_graph_task(gradient)
        for unit in self._calls.completed_by(call):
            self._finish(unit)

    def _before_backward(self, unit: int, pre_backward: Callable[[bool], None], prefetch: bool, *_: Any) -> None:
        """Gather a unit for its backward, unless that is over: one of its outputs may be an input, which is older."""
        if not self._calls.is_complete(unit):
            pre_backward(prefetch)

    def _finish(self, unit: int) -> None:
        """Take the gradients of a unit, whose backward is over, and free what is gathered for it."""
        self._calls.complete(unit)
        if (group := _group(self._units[unit])) is not None and group._training_state == TrainingState.PRE_BACKWARD:
            group.post_backward()
        self._gradients.advance(unit)

    def _check_graph_task(self, _gradient: Tensor) -> None:
        """Raise UsageError in a nested backward: at its end fully_shard would take the gradients of all units."""
        if not self._backward:
            raise _foreign_backward()
        task = torch._C._current_graph_task_id()
        if self._graph_task == -1:
            self._graph_task = task
        if self._graph_task != task:
            raise refusal(
                "a backward within the backward goes through the placed model, whose weights are in rows, as "
                "torch.utils.checkpoint does with use_reentrant=True",
                "give it use_reentrant=False, let placement.recompute do it, or use strategy ddp or zero1",
            )

    def _count_parameters(self) -> None:
        """Complete a unit once each of its parameters has its gradient, in backwards through several threads."""
        if self._counts_parameters:
            return
        self._counts_parameters = True
        for number, unit in enumerate(self._units[:-1]):
            group = _group(unit)
            parameters = [] if group is None else [each._unsharded_param for each in group.fsdp_params]
            if parameters and all(parameter.requires_grad for parameter in parameters):
                for parameter in parameters:
                    parameter.register_post_accumulate_grad_hook(
                        partial(self._count_accumulated, number, len(parameters))
                    )

    def _count_accumulated(self, unit: int, of: int, _parameter: Tensor) -> None:
        accumulated = self._calls.accumulate(unit)
        if self._backward and self._calls.several_threads and accumulated == of:
            self._finish(unit)

    def _hand(self, unit: int, gradients: Tensor, output: Tensor) -> None:
        """Take what a unit's backward made, to be passed on in its turn."""
        if not self._backward:
            raise _foreign_backward()
        if self._offloads:
            self._outputs.setdefault(unit, output)
        self._gradients.put(unit, gradients, output)

    def _make_zeros(self, unit: int) -> None:
        """Let fully_shard hand over zeros for a unit that was not called."""
        if not self.keep_gathered:
            self._gathers.reach(unit)
        _group(self._units[unit]).post_backward()

    def _may_wait(self) -> bool:
        return self._in_order and not self._gathers.differed

    def _pass_on(self, unit: int, gradients: Tensor, output: Tensor, may_wait: bool) -> None:
        """Call `receive` on the stream that fully_shard reduces on, which calls the hook there.

        What is added is of that stream's memory then, whenever it comes. Memory of the computing stream would be given
        out to that again as soon as nobody holds it, though the other may not have read it yet.
        """
        group = _group(self._units[unit])
        side, here = group.comm_ctx.reduce_scatter_stream, group.device_handle.current_stream()
        side.wait_stream(here)
        with group.device_handle.stream(side):
            self.receive(unit, gradients, output, may_wait)
        here.wait_stream(side)

    def _check(self, unit: int, left: Sequence[int]) -> None:
        """Raise UsageError for a unit that others do not gather."""
        if unit not in left:
            raise UsageError(
                f"{self.names[unit]} is called more often than in the first forward, or its backward did not reach it "
                f"then, and other processes would have to gather it for that; call it equally often in each forward "
                f"and let each loss reach it (0 * output.sum() beside what is detached), or use strategy zero2, zero1 "
                f"or ddp"
            )

    def _gather(self, unit: int) -> None:
        self._units[unit].unshard()

    def _scatter(self, unit: int) -> None:
        self._units[unit].reshard()

    def _prefetch(self) -> None:
        if left := self._gathers.remaining():
            group = _group(self._units[left[0]])
            group._prefetch_unshard(group, "backward")


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


def _check_gradients(units: Sequence[FSDPModule], names: Sequence[str]) -> None:
    """Raise UsageError if a parameter got a gradient after the gradients of its unit were taken."""
    for unit, name in zip(units, names, strict=True):
        group = _group(unit)
        for parameter in () if group is None else group.fsdp_params:
            tensor = getattr(parameter, "_unsharded_param", None)
            if tensor is not None and tensor.grad is not None:
                raise UsageError(
                    f"a weight of {name} is used before {name} is called, so its gradient is not complete after "
                    "it: use it in its module alone, or use strategy ddp or zero1"
                )


def _ask(mesh: DeviceMesh, numbers: Sequence[int]) -> list[list[int]]:
    answers = [torch.empty(len(numbers), dtype=torch.int64) for _ in range(mesh.size())]
    with translate_peer_errors():
        dist.all_gather(answers, torch.tensor(numbers), group=mesh.get_group())
    return [each.tolist() for each in answers]


def _shard(tensor: DTensor, mesh: DeviceMesh, primary: bool) -> Shard:
    # As torch.chunk cuts: all members have as many rows as the first, but for the last ones.
    height = -(-tensor.shape[0] // mesh.size())
    own = tensor._local_tensor.detach()
    return Shard(own, min(mesh.get_local_rank() * height, tensor.shape[0]), tensor.shape, primary)


def _foreign_backward() -> UsageError:
    return refusal(
        "a backward that is not step.backward goes through the placed model, whose weights are in rows",
        "give the whole loss to step.backward(mean=loss), once for each micro-batch; for a derivative beside it "
        "use strategy ddp or zero1",
    )


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


def _leave_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Stand in for what puts an autograd node before a unit's inputs (see comm/unit_calls.py)."""
    return args, kwargs


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
