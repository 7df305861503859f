"""The interface to torch's fully_shard (FSDP2).

Replaces fully_shard's reduce-scatter, so that Lockstep gets the unreduced gradients of each rank and sums them in its
own order.
"""

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
from lockstep.comm.gathers import CALL_MODEL_ADVICE, CALLED_DIRECTLY, ScheduledGathers
from lockstep.comm.gradient_queue import GradientQueue
from lockstep.comm.peer_errors import translate_peer_errors
from lockstep.comm.unit_calls import UnitCalls
from lockstep.comm.unit_outputs import separate_outputs
from lockstep.common.user_code import make_refusal
from lockstep.core.shard import MaybeSharded, Shard
from lockstep.errors import UsageError

# Called for each unit in the backward pass, in the same order on all members. The arguments are the index of the unit,
# the flat gradients of its parameters (one part per member), the flat tensor that its sharded gradients are views of,
# and whether the call may wait for other members.
ReceiveGradients = Callable[[int, Tensor, Tensor, bool], None]


@dataclass(frozen=True)
class GatherDtype:
    """The dtype in which parameters are gathered, except `unconverted_parameters`, which keep their own dtype."""

    dtype: torch.dtype
    unconverted_parameters: frozenset[nn.Parameter] = frozenset()


@final
@dataclass(eq=False)
class ShardedModel:
    """A model whose parameters are sharded by rows over the ranks of `mesh`, called members below.

    Each of the `units` is gathered as a whole. The parameters that aren't in any of these units form the last unit. A
    unit is gathered before its forward pass and again before its backward pass or, if `keep_gathered` is set, once for
    both. `gather_dtype` sets the dtype of the gathered parameters. Gradients have the dtype of the shards.

    Members may call different units in the same forward pass (comm/gathers.py). If a unit isn't called, its gradients
    are zeros, as in a single process. Once the backward pass of a unit is complete (comm/unit_calls.py), its gradients
    are passed to `receive`, in the same order on all members (comm/gradient_queue.py).
    """

    model: nn.Module
    units: InitVar[Sequence[nn.Module]]
    names: Sequence[str]
    mesh: DeviceMesh
    receive: ReceiveGradients
    keep_gathered: bool
    offload: InitVar[bool]
    gather_dtype: InitVar[GatherDtype | None] = None

    def __post_init__(self, units: Sequence[nn.Module], offload: bool, gather_dtype: GatherDtype | None) -> None:
        model, mesh, keep_gathered = self.model, self.mesh, self.keep_gathered
        self._offloads = offload and mesh.device_type == "cuda"  # whether shards are offloaded to the CPU
        self._outputs: dict[int, Tensor] = {}  # by unit: the output of the reduce-scatter, if shards are offloaded
        self._calls = UnitCalls(len(units) + 1)
        self._active_forwards = 0
        self._counts_parameters = False  # whether the hooks of _count_parameters are registered
        self._in_step_backward = False  # whether a backward pass of a step is running
        self._graph_task = -1  # autograd's ID of this backward pass
        self._units = [cast(FSDPModule, unit) for unit in (*units, model)]
        self._gradients = GradientQueue(
            self.names, self._calls.is_under_way, self._make_zeros, self._receive_on_stream, self._may_wait
        )
        self._gathers = ScheduledGathers(
            partial(_all_gather_unit_indices, mesh),
            self._unshard,
            self._reshard,
            self._gradients.submit_ready,
            self._check_schedule,
        )
        policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
        # Don't cast the inputs of units, because a single process has no units.
        precision = _make_mp_policy(gather_dtype)
        is_older, unconverted = (
            older_fsdp.needs_backports(),
            frozenset() if gather_dtype is None else gather_dtype.unconverted_parameters,
        )
        for number, unit in enumerate((*units, model)):
            locations = older_fsdp.find_parameters(unit, unconverted) if is_older else ()
            fully_shard(
                unit, mesh=mesh, reshard_after_forward=not keep_gathered, offload_policy=policy, mp_policy=precision
            )
            sharded, group = self._units[number], _get_param_group(self._units[number])
            if is_older and group is not None:
                older_fsdp.patch_group(group, locations)
            if gather_dtype is not None and group is not None:
                grad_dtype.keep_computed_dtype(group)
            _add_zeros(sharded)
            sharded.set_custom_all_gather(_AllGatherHook(partial(self._gathers.join_before, number)))
            sharded.set_custom_reduce_scatter(_ReduceScatterHook(partial(self._enqueue_gradients, number)))
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            if group is not None:
                if not keep_gathered:
                    group._backward_prefetch = self._prefetch
                group._register_post_backward_hook = _skip_input_hook
                group.pre_backward = partial(self._before_backward, number, group.pre_backward)
            if unit is not model:
                unit.register_forward_pre_hook(partial(self._begin_unit_forward, number), prepend=True)
            unit.register_forward_hook(partial(self._end_unit_forward, number), prepend=True, with_kwargs=True)
            setattr(unit, "__deepcopy__", _raise_on_copy)  # noqa: B010 - takes precedence over fully_shard's
        if keep_gathered:
            self._units[-1].set_reshard_after_backward(False)
        # Whether to free the parameters after the current backward pass, if they stay gathered during a step.
        self._reshards_after_backward = False
        model.register_forward_pre_hook(self._begin_forward, prepend=True)
        model.register_forward_hook(self._end_forward)
        # Save the sharded parameters, because gathering a unit replaces the parameters of its modules.
        self._sharded_parameters = list(model.parameters())
        numbers = [number for number, unit in enumerate(self._units) if _get_sharded_parameters(unit)]
        self._forward_order = sorted(numbers, key=lambda number: (number + 1) % len(self._units))  # the last unit first
        self._all_gathered = False  # whether all units are gathered
        # Whether all members have requested units in the same order in all backward passes so far.
        self._same_order = True

    def begin_step(self) -> None:
        """Forget the unit calls since the last backward pass. Call this before the first forward pass of a step."""
        self._calls.forget_calls()

    def begin_round(self, is_last: bool) -> None:
        """Prepare for a backward pass.

        Call this before each backward pass. Set `is_last` for the last one of a step.
        """
        self._in_step_backward = True
        self._outputs.clear()
        self._reshards_after_backward = self.keep_gathered and is_last
        if not self.keep_gathered:
            order = sorted(self._forward_order, reverse=True)
            self._gathers.begin(f"backward of {self._calls.num_forwards}", order)
            self._unshard(order[0])  # the last unit, even if this member called none of the last blocks
        self._all_gathered = self._all_gathered and not is_last
        if self._calls.has_several_threads:
            self._count_parameters()
        self._gradients.begin()

    def end_backward(self) -> None:
        """Mark all units as complete, and submit their gradients. Call this method after each backward pass."""
        self._calls.end_backward()
        if not self.keep_gathered:
            self._gathers.end(call_flags=self._calls.get_call_flags())
            self._same_order = self._same_order and not self._gathers.order_differed
        self._gradients.end()
        _check_gradients(self._units, self.names)
        # Free parameters only after the full backward pass. Otherwise, autograd would read freed memory if a weight is
        # used outside its unit.
        if self._reshards_after_backward:
            for module in self._units:
                module.reshard()
        self._gradients.clear()
        self._calls.clear()
        self._in_step_backward = False
        self._graph_task = -1

    def end_round(self) -> None:
        """Set the gradients to None. Call this method after each backward pass of a step except the last."""
        for parameter in self._sharded_parameters:
            parameter.grad = None

    def copy_sums(self) -> None:
        """Copy the gradient sums of a step to the offloaded shards. Call this method once the sums are complete.

        This is necessary because fully_shard copies the gradients to the CPU before the sums are complete. No-op if
        shards aren't offloaded.
        """
        for unit, output in self._outputs.items():
            offset = 0
            for parameter in _get_param_group(self._units[unit]).fsdp_params:
                if parameter.sharded_param.requires_grad:
                    rows = output.as_strided(parameter.sharded_size, parameter.contiguous_sharded_stride, offset)
                    parameter.sharded_param.grad._local_tensor.copy_(rows)
                    offset += parameter.padded_sharded_param_size.numel()
        self._outputs.clear()

    def reshard_all(self) -> None:
        """Free all gathered parameters, because the shards have changed."""
        self._all_gathered = False
        for unit in self._units:
            unit.reshard()

    def state_dict(self, primary: bool) -> dict[str, MaybeSharded]:
        """Return the state dict of the model. Set `primary` if this rank reports its rows (core/shard.py)."""
        items = self.model.state_dict().items()
        return {
            name: _make_shard(tensor, self.mesh, primary) if isinstance(tensor, DTensor) else tensor
            for name, tensor in items
        }

    def get_trained_shards(self, primary: bool) -> dict[str, tuple[Shard, DTensor]]:
        """Return a shard with this rank's rows, and the DTensor, of each trainable parameter, in model order."""
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        return {name: (_make_shard(cast(Any, p), self.mesh, primary), cast(Any, p)) for name, p in parameters.items()}

    def get_gathered_parameters(self) -> dict[Tensor, Tensor]:
        """Return a map from the unsharded parameters that have been gathered so far to their shards."""
        shards = {}
        for group in filter(None, map(_get_param_group, self._units)):
            for parameter in group.fsdp_params:
                if (tensor := getattr(parameter, "_unsharded_param", None)) is not None:
                    shards[tensor] = parameter.sharded_param
        return shards

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        if _in_backward():  # recomputation
            return
        self._active_forwards += 1
        if torch.is_grad_enabled():
            self._calls.begin_forward()
        if not self._all_gathered:
            self._gathers.begin(f"forward, training={module.training}", self._forward_order)

    def _end_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if _in_backward():
            return
        self._active_forwards -= 1
        if self._all_gathered:
            return
        schedule = self._gathers.end(keep_gathered=self.keep_gathered)
        self._all_gathered = self.keep_gathered
        if not self._gradients.unit_order and torch.is_grad_enabled():
            trained = {
                unit
                for unit in self._forward_order
                if any(parameter.requires_grad for parameter in _get_sharded_parameters(self._units[unit]))
            }
            self._gradients.unit_order = [unit for unit in reversed(list(dict.fromkeys(schedule))) if unit in trained]

    def _begin_unit_forward(self, unit: int, module: nn.Module, inputs: Any) -> None:
        if _in_backward():
            return
        if not self._active_forwards:
            raise make_refusal(f"{self.names[unit]} {CALLED_DIRECTLY}", CALL_MODEL_ADVICE)
        # Calls without gradients also count under autocast, because autocast caches the casts of weights with their
        # autograd nodes. A later call reuses these older nodes, so autograd only reaches them after all units in
        # between.
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self.mesh.device_type):
            self._calls.begin_call(unit)

    def _end_unit_forward(self, unit: int, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        freed = set()
        if not self.keep_gathered and (group := _get_param_group(self._units[unit])) is not None:
            freed = {parameter._unsharded_param.untyped_storage().data_ptr() for parameter in group.fsdp_params}
        outputs = separate_outputs(outputs, (args, kwargs), freed)
        if torch.is_grad_enabled():
            notify: Callable[[Tensor], None] = self._check_graph_task
            if unit != len(self._units) - 1 and not _in_backward():
                notify = partial(self._on_output_gradient, self._calls.end_call())
            for output in tree_leaves(outputs):
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(notify)  # type: ignore[no-untyped-call]  # must run before fully_shard gathers
        return outputs

    def _on_output_gradient(self, call_index: int, gradient: Tensor) -> None:
        """Complete the units that were first called after call `call_index`, because its output gradient is ready."""
        self._check_graph_task(gradient)
        for unit in self._calls.get_completed_units(call_index):
            self._finish_unit(unit)

    def _before_backward(self, unit: int, pre_backward: Callable[[bool], None], prefetch: bool, *_: Any) -> None:
        """Gather a unit for its backward pass. No-op if the unit is already complete."""
        if not self._calls.is_complete(unit):
            pre_backward(prefetch)

    def _finish_unit(self, unit: int) -> None:
        """Collect a unit's gradients after its backward pass, and free its gathered parameters."""
        self._calls.mark_complete(unit)
        if (
            group := _get_param_group(self._units[unit])
        ) is not None and group._training_state == TrainingState.PRE_BACKWARD:
            group.post_backward()
        self._gradients.submit_ready(unit)

    def _check_graph_task(self, _gradient: Tensor) -> None:
        """Raise UsageError in a nested backward pass: fully_shard would collect all gradients at its end."""
        if not self._in_step_backward:
            raise _make_foreign_backward_error()
        task = torch._C._current_graph_task_id()
        if self._graph_task == -1:
            self._graph_task = task
        if self._graph_task != task:
            raise make_refusal(
                "nested backward passes, such as those of torch.utils.checkpoint with use_reentrant=True, are not "
                "supported if the weights of the placed model are sharded",
                "pass use_reentrant=False, use placement.recompute instead, or use strategy ddp or zero1",
            )

    def _count_parameters(self) -> None:
        """Complete each unit once all of its parameters have gradients, for forward passes on several threads."""
        if self._counts_parameters:
            return
        self._counts_parameters = True
        for number, unit in enumerate(self._units[:-1]):
            group = _get_param_group(unit)
            parameters = [] if group is None else [sharded._unsharded_param for sharded in group.fsdp_params]
            if parameters and all(parameter.requires_grad for parameter in parameters):
                for parameter in parameters:
                    parameter.register_post_accumulate_grad_hook(
                        partial(self._count_accumulated_gradient, number, len(parameters))
                    )

    def _count_accumulated_gradient(self, unit: int, num_parameters: int, _parameter: Tensor) -> None:
        accumulated = self._calls.record_gradient(unit)
        if self._in_step_backward and self._calls.has_several_threads and accumulated == num_parameters:
            self._finish_unit(unit)

    def _enqueue_gradients(self, unit: int, gradients: Tensor, output: Tensor) -> None:
        """Add the gradients of a unit to the queue."""
        if not self._in_step_backward:
            raise _make_foreign_backward_error()
        if self._offloads:
            self._outputs.setdefault(unit, output)
        self._gradients.put(unit, gradients, output)

    def _make_zeros(self, unit: int) -> None:
        """Make fully_shard reduce zero gradients for a unit that wasn't called."""
        if not self.keep_gathered:
            self._gathers.join_through(unit)
        _get_param_group(self._units[unit]).post_backward()

    def _may_wait(self) -> bool:
        return self._same_order and not self._gathers.order_differed

    def _receive_on_stream(self, unit: int, gradients: Tensor, output: Tensor, may_wait: bool) -> None:
        """Call `receive` on fully_shard's reduce-scatter stream, so that this stream owns the memory of the sums.

        Memory of the compute stream could be reused as soon as it is freed, even if the reduce-scatter stream hasn't
        read it yet.
        """
        group = _get_param_group(self._units[unit])
        side_stream, current_stream = group.comm_ctx.reduce_scatter_stream, group.device_handle.current_stream()
        side_stream.wait_stream(current_stream)
        with group.device_handle.stream(side_stream):
            self.receive(unit, gradients, output, may_wait)
        current_stream.wait_stream(side_stream)

    def _check_schedule(self, unit: int, remaining: Sequence[int]) -> None:
        """Raise UsageError if `remaining`, the rest of the schedule, doesn't contain the unit."""
        if unit not in remaining:
            raise make_refusal(
                f"the other processes do not gather the weights of {self.names[unit]}: {self.names[unit]} is called "
                f"more often than in the first forward, or the first backward did not reach it",
                "call it the same number of times in every forward, and let every loss depend on it (add 0 * "
                "output.sum() for a detached output), or use strategy zero2, zero1 or ddp",
            )

    def _unshard(self, unit: int) -> None:
        self._units[unit].unshard()

    def _reshard(self, unit: int) -> None:
        self._units[unit].reshard()

    def _prefetch(self) -> None:
        if remaining := self._gathers.remaining():
            group = _get_param_group(self._units[remaining[0]])
            group._prefetch_unshard(group, "backward")


def _make_mp_policy(gather_dtype: GatherDtype | None) -> MixedPrecisionPolicy:
    if gather_dtype is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    policy = partial(MixedPrecisionPolicy, gather_dtype.dtype, torch.float32, cast_forward_inputs=False)
    if not gather_dtype.unconverted_parameters or older_fsdp.needs_backports():
        return policy()
    return policy(
        param_dtype_override_fn=lambda parameter: (
            parameter.dtype if parameter in gather_dtype.unconverted_parameters else None
        )
    )


def to_full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor. All ranks that hold a shard must call this. Returns other tensors as is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def get_local_gradient(parameter: DTensor) -> Tensor:
    """Return this rank's rows of a parameter's gradient."""
    if parameter.grad is None:
        return torch.zeros_like(parameter._local_tensor)
    return cast(DTensor, parameter.grad)._local_tensor


def _check_gradients(units: Sequence[FSDPModule], names: Sequence[str]) -> None:
    """Raise UsageError if a parameter received a gradient after the gradients of its unit were collected."""
    for unit, name in zip(units, names, strict=True):
        group = _get_param_group(unit)
        for parameter in () if group is None else group.fsdp_params:
            tensor = getattr(parameter, "_unsharded_param", None)
            if tensor is not None and tensor.grad is not None:
                raise UsageError(
                    f"a weight of {name} is used before {name} is called, so its gradient is incomplete when the "
                    f"backward of {name} ends; use the weight only in its own module, or use strategy ddp or zero1"
                )


def _all_gather_unit_indices(mesh: DeviceMesh, called_units: Sequence[int]) -> list[list[int]]:
    gathered = [torch.empty(len(called_units), dtype=torch.int64) for _ in range(mesh.size())]
    with translate_peer_errors():
        dist.all_gather(gathered, torch.tensor(called_units), group=mesh.get_group())
    return [row.tolist() for row in gathered]


def _make_shard(tensor: DTensor, mesh: DeviceMesh, primary: bool) -> Shard:
    rows_per_member = compute_rows_per_member(tensor.shape, mesh.size())
    rows = tensor._local_tensor.detach()
    return Shard(rows, min(mesh.get_local_rank() * rows_per_member, tensor.shape[0]), tensor.shape, primary)


def compute_rows_per_member(shape: torch.Size, num_members: int) -> int:
    """Return the number of rows per member. As in torch.chunk, the last members can have fewer rows or no rows."""
    return -(-shape[0] // num_members)


def _make_foreign_backward_error() -> UsageError:
    return make_refusal(
        "a backward other than step.backward goes through the placed model, whose weights are sharded by rows",
        "pass the whole loss to step.backward(mean=loss), once per micro-batch; to compute other derivatives, use "
        "strategy ddp or zero1",
    )


def _raise_on_copy(_memo: object) -> NoReturn:
    raise make_refusal(
        "the placed model cannot be copied, because its weights are sharded by rows",
        "copy it before run.place and read the weights with full_tensor(), or use strategy ddp or zero1",
    )


def _get_param_group(unit: FSDPModule) -> Any:
    """Return the FSDPParamGroup of a unit, or None if the unit has no parameters of its own."""
    return unit._get_fsdp_state()._fsdp_param_group


def _get_sharded_parameters(unit: FSDPModule) -> list[Any]:
    group = _get_param_group(unit)
    return [] if group is None else [sharded.sharded_param for sharded in group.fsdp_params]


def _add_zeros(unit: FSDPModule) -> None:
    """Make fully_shard reduce zeros for the unused parameters of a unit, which other members may have used.

    Like set_reduce_scatter_unused_params, which is missing in torch 2.11.
    """
    if (group := _get_param_group(unit)) is None:
        return
    post_backward = group.post_backward

    def post_backward_with_zeros(*unused: Any) -> None:
        for sharded in group.fsdp_params:
            parameter = getattr(sharded, "_unsharded_param", None)  # None before the first gather
            if parameter is not None and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype, requires_grad=False)
        post_backward(*unused)

    group.post_backward = post_backward_with_zeros


@final
class _AllGatherHook(DefaultAllGather):
    """Replaces the all-gather of a unit. Calls `before_gather` before each all-gather."""

    def __init__(self, before_gather: Callable[[], None]) -> None:
        self._before = before_gather

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._before()
        return super().__call__(output_tensor, input_tensor, group, async_op)


@final
class _ReduceScatterHook(DefaultAllocMixin, ReduceScatter):
    """Replaces the reduce-scatter of a unit. Passes the unreduced gradients to `enqueue_gradients`."""

    def __init__(self, enqueue_gradients: Callable[[Tensor, Tensor], None]) -> None:
        self._enqueue_gradients = enqueue_gradients

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._enqueue_gradients(input_tensor, output_tensor)
        return None


def _skip_input_hook(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces fully_shard's hook that adds an autograd node before a unit's inputs (comm/unit_calls.py)."""
    return args, kwargs


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
