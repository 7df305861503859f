"""Master weights: full-precision weights that the optimizer updates, and 16-bit copies that the model computes with.

Micikevicius et al. 2018, "Mixed precision training", section 3.1: an update can be too small to change a weight in 16
bits.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from lockstep.core.shard import MaybeSharded
from lockstep.parallel.gradients import get_wide_gradient
from lockstep.parallel.layouts.base import REPLICATED_NORMS, NormFunctions
from lockstep.parallel.optimizer_state import NamedParameter


@final
class ReplicatedLayout:
    """The layout of a model that is replicated on each rank, with or without master weights.

    By default, the weights are the parameters of the model. If `dtype` is set, the parameters become copies of the
    weights in this dtype, and the model computes with the copies. The backward pass computes gradients in `dtype`,
    which are summed in fp32. The parameters that `find_fp32_parameters` returns have no copies.
    """

    norms: ClassVar[NormFunctions] = REPLICATED_NORMS

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self._model = model
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        if dtype is not None:
            wide = find_fp32_parameters(model, dtype)
            self._copies = {
                parameter: _separate_master_weight(parameter, dtype)
                for parameter in model.parameters()
                if parameter not in wide
            }

    def get_master_weight(self, copy: nn.Parameter) -> nn.Parameter:
        """Return the master weight of a parameter, or the parameter itself if it isn't a copy."""
        return self._copies.get(copy, copy)

    @cached_property
    def trained(self) -> list[NamedParameter]:
        """The weights that require a gradient, in model order. A shared weight is only listed under its first name."""
        return [
            (name, self.get_master_weight(copy)) for name, copy in self._model.named_parameters() if copy.requires_grad
        ]

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """See Layout."""
        return tensor

    def state(self) -> dict[str, MaybeSharded]:
        """Return the model state, with master weights instead of their copies."""
        tensors = self._model.state_dict(keep_vars=True)
        return {
            name: (self.get_master_weight(tensor) if isinstance(tensor, nn.Parameter) else tensor).detach()
            for name, tensor in tensors.items()
        }

    def release_weights(self) -> None:
        """Drop all references to trained weights. Call this if the caller stores the trained weights itself."""
        self._copies = {copy: weight for copy, weight in self._copies.items() if not copy.requires_grad}

    def collect(self) -> None:
        """See Layout. Moves the gradients from the copies to the weights."""
        for copy, weight in self._copies.items():
            if copy.requires_grad:
                weight.grad, copy.grad = get_wide_gradient(copy), None

    def publish(self) -> None:
        """See Layout. Copies the weights to the copies that the model computes with."""
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(list(self._copies), list(self._copies.values()))

    reload = publish


def convert_compute_dtype(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Convert a model in place to compute in `dtype`, without master weights, and return it.

    If `dtype` is None, this is a no-op.
    """
    if dtype is not None:
        widen_batchnorm(model)
        ReplicatedLayout(model, dtype)
    return model


def find_fp32_parameters(model: nn.Module, dtype: torch.dtype) -> frozenset[nn.Parameter]:
    """Return the parameters that stay fp32 in a model that computes in `dtype`.

    With fp16, these are the parameters of BatchNorm layers, as with O2 in apex. With bf16, which has the range of fp32,
    there are none.
    """
    if dtype != torch.float16:
        return frozenset()
    layers = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    return frozenset(parameter for layer in layers for parameter in layer.parameters(recurse=False))


def convert_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters of a model, but not its buffers, to `dtype` in place."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def widen_batchnorm(model: nn.Module) -> None:
    """Make BatchNorm layers accept 16-bit parameters. Their statistics stay in fp32.

    torch's kernels require the same dtype for parameters and statistics, regardless of the dtype of the inputs. Call
    this function before any other that wraps the layers, so that those wrappers call the replaced forward methods.
    """
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.forward = partial(_forward_with_wide_parameters, layer, layer.forward)  # type: ignore[method-assign]


def _separate_master_weight(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Convert `parameter` to `dtype` in place, and return its original values as a new parameter, the master weight."""
    weight = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
    parameter.data = weight.data.to(dtype)
    if parameter.requires_grad:
        # Allow any dtype: `grad` first contains a gradient in the dtype of the copy, and then the sum in fp32
        # (gradients.py). Don't set this to fp32: autograd would convert the gradients of all uses of the parameter
        # before adding them. With fully_shard, autograd adds first, so the bits would differ.
        parameter.grad_dtype = None
    return weight


def _forward_with_wide_parameters(layer: nn.Module, forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    parameters = {name: parameter for name, parameter in layer._parameters.items() if parameter is not None}
    wide = {
        name: parameter.to(torch.promote_types(parameter.dtype, torch.float32))
        for name, parameter in parameters.items()
    }
    vars(layer).update(wide)  # instance attributes take precedence over parameters, in any class
    try:
        return forward(inputs)
    finally:
        for name in parameters:
            del vars(layer)[name]
