"""Counts the floating-point operations (FLOPs) of a model in a forward and backward pass.

Only matrix products and convolutions are counted, as usual for model FLOPs. This includes attention, which the meta
device computes with matrix products. A multiplication and an addition count as 2 operations.

torch.utils.flop_counter isn't used, because it imports Triton, which takes a third of a second. In addition, torch 2.15
counts the weight gradient of a grouped convolution once per group.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.core.batch import tensors_of


@final
class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager that counts the operations in its block, including backward passes. It is reusable."""

    supports_higher_order_operators = True  # otherwise torch raises for them. They aren't counted

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call an operation and count its FLOPs. See `TorchDispatchMode`."""
        result = function(*args, **(kwargs or {}))
        formula = _FORMULAS.get(getattr(function, "overloadpacket", None))
        if formula is not None:
            self.flops += formula(args, result)
        return result


def backward_flops(counter: FlopCounter, outputs: object) -> int | None:
    """Run a backward pass from `outputs` under `counter`. Return the total count, or None if it fails."""
    tensors = [tensor for tensor in tensors_of(outputs) if tensor.requires_grad]
    if not tensors:
        return None
    try:
        with counter:
            torch.autograd.backward([tensor.sum() for tensor in tensors])
    except Exception:  # third-party autograd functions may need values, which the meta device doesn't have
        return None
    return counter.flops


def _product(args: Sequence[Any], result: Tensor) -> int:
    """Return the FLOPs of a matrix product of [..., n, k] and [..., k, m]. An added matrix, as in addmm, is ignored."""
    right: Tensor = args[-1]
    return 2 * result.numel() * right.shape[-2]


def _convolution(args: Sequence[Any], result: Tensor) -> int:
    inputs, weight, transposed = args[0], args[1], args[6]
    return _per_position(inputs if transposed else result, weight)


def _convolution_backward(args: Sequence[Any], result: object) -> int:
    """Return the FLOPs of the gradients of inputs and weight. Each gradient takes as many FLOPs as the forward pass."""
    gradient, inputs, weight, transposed, output_mask = *args[:3], args[7], args[10]
    return _per_position(inputs if transposed else gradient, weight) * sum(map(bool, output_mask[:2]))


def _per_position(output: Tensor, weight: Tensor) -> int:
    return 2 * len(output) * math.prod(output.shape[2:]) * weight.numel()


_FORMULAS: Final[Mapping[Any, Callable[[Sequence[Any], Any], int]]] = {
    torch.ops.aten.mm: _product,
    torch.ops.aten.bmm: _product,
    torch.ops.aten.addmm: _product,
    torch.ops.aten.baddbmm: _product,
    torch.ops.aten.convolution: _convolution,
    torch.ops.aten.convolution_backward: _convolution_backward,
}
