"""The door to torch's fully_shard (FSDP2), whose reduce-scatter hands gradients to us instead of adding them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lockstep.core.shard import MaybeSharded, Shard
from lockstep.errors import UsageError

# Called in backward with the number of a unit, the gradients of its parameters as one flat tensor with a part for each
# member, and the flat tensor that the unit's sharded gradients are views of.
Receive = Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True)
class Narrow:
    """The dtype that parameters are gathered in, but for some that are gathered as they are."""

    dtype: torch.dtype
    wide: frozenset[nn.Parameter] = frozenset()


@final
class Sharded:
    """A model whose tensors are cut by rows over the members of `mesh`, unit by unit; what is in no unit is the last.

    A unit's parameters are gathered before its forward and again before its backward, or with `keep_gathered` once for
    both; as `narrow` says, where it is given. Its gradients are in the dtype of the shards.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        mesh: DeviceMesh,
        receive: Receive,
        keep_gathered: bool,
        offload: bool,
        narrow: Narrow | None = None,
    ) -> None:
        self._model = model
        self._mesh = mesh
        self._keep_gathered = keep_gathered
        self._receive = receive
        self._copied_at_once = offload and mesh.device_type == "cuda"
        self._calls = [0] * (len(units) + 1)
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}
        self._units = [cast(FSDPModule, unit) for unit in (*units, model)]
        policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
        # What goes into a unit is not converted: in one process there are no units.
        precision = _policy(narrow)
        for number, unit in enumerate((*units, model)):
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=not keep_gathered,
                offload_policy=policy,
                mp_policy=precision,
            )
            self._units[number].set_custom_reduce_scatter(_ReduceScatterHook(partial(self._hand, number)))
            self._units[number].set_gradient_divide_factor(1.0)
            self._units[number].set_force_sum_reduction_for_comms(True)
            unit.register_forward_pre_hook(partial(self._count, number))
            # Around fully_shard's own hook, which turns tensors that want a gradient into others.
            unit.register_forward_pre_hook(_before_fully_shard, prepend=True, with_kwargs=True)
            unit.register_forward_pre_hook(_after_fully_shard, with_kwargs=True)
            unit.register_forward_hook(_without_views, prepend=True)
        self._parameters = list(model.parameters())  # the shards: while gathered, the model has others in their place
        # Which parameters a micro-batch uses may differ from rank to rank.
        self._units[-1].set_reduce_scatter_unused_params(True)

    def begin_round(self, last: bool) -> None:
        """Call before each backward of a step, and say of the last one that it is."""
        if self._keep_gathered:
            self._units[-1].set_reshard_after_backward(last)

    def end_backward(self) -> None:
        """Call when a backward is over: what units gave that were called several times in its forward is complete."""
        for unit, (gradients, output) in self._waiting.items():
            self._receive(unit, gradients, output)
        self._waiting.clear()
        self._calls = [0] * len(self._calls)

    def end_round(self) -> None:
        """Call after each backward but a step's last one: what reduce-scatter gave out then was no gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def scatter(self) -> None:
        """Free what is gathered: it no longer is what the shards are."""
        for unit in self._units:
            unit.reshard()

    def state(self, primary: bool) -> dict[str, MaybeSharded]:
        """Return the model's state; `primary` says whether this rank's replica is the one that reports its shards."""
        return {name: self._held(tensor, primary) for name, tensor in self._model.state_dict().items()}

    def trained(self, primary: bool) -> dict[str, tuple[Shard, DTensor]]:
        """Return this rank's rows of each parameter that wants a gradient, and the parameter, in the model's order."""
        parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        return {name: (self._shard(cast(Any, p), primary), cast(Any, p)) for name, p in parameters.items()}

    def _count(self, unit: int, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._calls[unit] += 1

    def _hand(self, unit: int, gradients: Tensor, output: Tensor) -> None:
        """Pass on what a unit's backward made, once for each unit and backward.

        fully_shard reduces after the backward of each call. Autograd adds the calls of a unit up itself: of each
        parameter the whole gradient comes after one of them, and zeros after the others.
        """
        if self._calls[unit] <= 1:
            self._receive(unit, gradients, output)
        elif self._copied_at_once:
            raise UsageError(
                f"{type(self._units[unit]).__name__} is called {self._calls[unit]} times in one forward, and its "
                f"gradients would leave the GPU before they are complete; set the strategy's offload to false"
            )
        elif unit not in self._waiting:
            self._waiting[unit] = gradients, output  # whose views become the gradients: those of later calls are added
        else:
            _bits(self._waiting[unit][0]).bitwise_or_(_bits(gradients))  # -0.0 + 0.0 would be 0.0

    def _held(self, tensor: Tensor, primary: bool) -> MaybeSharded:
        return self._shard(tensor, primary) if isinstance(tensor, DTensor) else tensor

    def _shard(self, tensor: DTensor, primary: bool) -> Shard:
        # As torch.chunk cuts: all members have as many rows as the first, but for the last ones.
        height = -(-tensor.shape[0] // self._mesh.size())
        own = tensor._local_tensor.detach()
        return Shard(own, min(self._mesh.get_local_rank() * height, tensor.shape[0]), tensor.shape, primary)


def _policy(narrow: Narrow | None) -> MixedPrecisionPolicy:
    if narrow is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        narrow.dtype,
        torch.float32,
        cast_forward_inputs=False,
        param_dtype_override_fn=(lambda each: each.dtype if each in narrow.wide else None) if narrow.wide else None,
    )


def own_gradient(parameter: DTensor) -> Tensor:
    """Return this rank's rows of a parameter's gradient."""
    if parameter.grad is None:
        return torch.zeros_like(parameter._local_tensor)
    return cast(DTensor, parameter.grad)._local_tensor


@final
class _ReduceScatterHook(ReduceScatter):
    def __init__(self, hand: Callable[[Tensor, Tensor], None]) -> None:
        self._hand = hand

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty([int(each) for each in size], dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._hand(input_tensor, output_tensor)
        return None


@final
class _Repeated:
    """Stands for an argument that is the very tensor which argument `key` is."""

    def __init__(self, key: int | str) -> None:
        self.key = key


@final
class _Strides:
    """The strides of all tensors among a unit's arguments, in the order of their tree."""

    def __init__(self, arguments: Arguments) -> None:
        self._strides = [_stride(leaf) for leaf in tree_leaves(arguments)]

    def restored(self, arguments: Arguments) -> Arguments:
        leaves, tree = tree_flatten(arguments)
        pairs = zip(leaves, self._strides, strict=True)
        same = (leaf if _stride(leaf) == stride else _Unchanged.apply(leaf, stride) for leaf, stride in pairs)
        return cast(Arguments, tree_unflatten(same, tree))


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _before_fully_shard(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Note what fully_shard's hook would lose by turning each tensor that wants a gradient into a view of it.

    - That several arguments are one tensor: attention, for one, goes another way where key is query. It gets one.
    - The strides of dims of one element, such as the samples of a micro-batch of one, which tell kernels in which
      memory format it is: torch makes strides anew when it makes a view.
    """
    first: dict[int, int | str] = {}

    def once(key: int | str, value: Any) -> Any:
        known = first.setdefault(id(value), key) if isinstance(value, Tensor) else key
        return value if known == key else _Repeated(known)

    args, kwargs = (
        tuple(once(key, value) for key, value in enumerate(args)),
        {key: once(key, kwargs[key]) for key in kwargs},
    )
    return (*args, _Strides((args, kwargs))), kwargs


def _after_fully_shard(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Give a unit its arguments as they were."""
    *given, strides = args
    args, kwargs = strides.restored((tuple(given), kwargs))

    def shown(value: Any) -> Any:
        if not isinstance(value, _Repeated):
            return value
        return args[value.key] if isinstance(value.key, int) else kwargs[value.key]

    return tuple(shown(value) for value in args), {key: shown(value) for key, value in kwargs.items()}


def _without_views(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Return outputs that share memory with no other, to autograd, though they stay where they were.

    fully_shard gathers a unit's parameters for its backward in a hook of its outputs, which one that is changed in
    place loses if it is a view.
    """
    if not torch.is_grad_enabled():
        return outputs

    def alone(output: Tensor) -> Tensor:
        return cast(Tensor, _Unchanged.apply(output, output.stride())) if output._is_view() else output

    return tree_map_only(Tensor, alone, outputs)


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
