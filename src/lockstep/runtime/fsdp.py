"""The door to torch's fully_shard (FSDP2), whose reduce-scatter hands gradients to us instead of adding them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

from lockstep.core.shard import Held, Shard

# Called in backward with the number of a unit, the gradients of its parameters as one flat tensor with a part for each
# member, and the flat tensor that the unit's sharded gradients are views of.
Receive = Callable[[int, Tensor, Tensor], None]


@final
class Sharded:
    """A model whose tensors are cut by rows over the members of `mesh`, unit by unit; what is in no unit is the last.

    A unit's parameters are gathered before its forward and again before its backward, or with `keep_gathered` once for
    both.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        mesh: DeviceMesh,
        receive: Receive,
        keep_gathered: bool,
        offload: bool,
    ) -> None:
        self._model = model
        self._mesh = mesh
        self._keep_gathered = keep_gathered
        self._units = [cast(FSDPModule, unit) for unit in (*units, model)]
        policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
        for number, unit in enumerate((*units, model)):
            fully_shard(unit, mesh=mesh, reshard_after_forward=not keep_gathered, offload_policy=policy)
            self._units[number].set_custom_reduce_scatter(_Handing(number, receive))
            self._units[number].set_gradient_divide_factor(1.0)
            self._units[number].set_force_sum_reduction_for_comms(True)
        self._parameters = list(model.parameters())  # the shards: while gathered, the model has others in their place
        # Which parameters a micro-batch uses may differ from rank to rank.
        self._units[-1].set_reduce_scatter_unused_params(True)

    def begin_round(self, last: bool) -> None:
        """Call before each backward of a step, and say of the last one that it is."""
        if self._keep_gathered:
            self._units[-1].set_reshard_after_backward(last)

    def end_round(self) -> None:
        """Call after each backward but a step's last one: what reduce-scatter gave out then was no gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def scatter(self) -> None:
        """Free what is gathered: it no longer is what the shards are."""
        for unit in self._units:
            unit.reshard()

    def state(self, speaks: bool) -> dict[str, Held]:
        """Return the model's state; `speaks` says whether this rank's replica is the one that tells its shards."""
        return {name: self._held(tensor, speaks) for name, tensor in self._model.state_dict().items()}

    def trained(self, speaks: bool) -> dict[str, tuple[Shard, DTensor]]:
        """Return this rank's rows of each parameter that wants a gradient, and the parameter, in the model's order."""
        parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        return {name: (self._shard(cast(Any, p), speaks), cast(Any, p)) for name, p in parameters.items()}

    def _held(self, tensor: Tensor, speaks: bool) -> Held:
        return self._shard(tensor, speaks) if isinstance(tensor, DTensor) else tensor

    def _shard(self, tensor: DTensor, speaks: bool) -> Shard:
        # As torch.chunk cuts: all members have as many rows as the first, but for the last ones.
        height = -(-tensor.shape[0] // self._mesh.size())
        own = tensor._local_tensor.detach()
        return Shard(own, min(self._mesh.get_local_rank() * height, tensor.shape[0]), tensor.shape, speaks)


def own_gradient(parameter: DTensor) -> Tensor:
    """Return this rank's rows of a parameter's gradient."""
    if parameter.grad is None:
        return torch.zeros_like(parameter._local_tensor)
    return cast(DTensor, parameter.grad)._local_tensor


@final
class _Handing(ReduceScatter):
    def __init__(self, number: int, receive: Receive) -> None:
        self._number = number
        self._receive = receive

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty([int(each) for each in size], dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._receive(self._number, input_tensor, output_tensor)
        return None
