"""Counts the floating-point operations (FLOPs) of a model in a forward and backward pass.

Only matrix products and convolutions are counted, as usual for model FLOPs. This includes attention, which consists of
matrix products on the meta device. A multiply-add counts as 2 operations.

This module doesn't use torch.utils.flop_counter, because importing Triton takes a third of a second, and because torch
2.15 counts the weight gradient of a grouped convolution once per group.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.core.batch import get_tensors


@final
class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A reusable context manager that counts the FLOPs of its `with` block, including backward passes."""

    supports_higher_order_operators = True  # otherwise, torch raises an error for these operators, which aren't counted

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call an operation, and count its FLOPs. See `TorchDispatchMode`."""
        result = function(*args, **(kwargs or {}))
        formula = _FORMULAS.get(getattr(function, "overloadpacket", None))
        if formula is not None:
            self.flops += formula(args, result)
        return result


def count_backward_flops(counter: FlopCounter, outputs: object) -> int | None:
    """Count the FLOPs of a backward pass from `outputs`, and return the total of `counter`.

    Returns None if no output requires a gradient, or if the backward pass fails.
    """
    tensors = [tensor for tensor in get_tensors(outputs) if tensor.requires_grad]
    if not tensors:
        return None
    try:
        with counter:
            torch.autograd.backward([tensor.sum() for tensor in tensors])
    except Exception:  # third-party autograd functions may fail on the meta device, whose tensors have no values
        return None
    return counter.flops


def _count_matmul_flops(args: Sequence[Any], result: Tensor) -> int:
    """Return the FLOPs of a matrix product of [..., n, k] and [..., k, m]. The addition in addmm isn't counted."""
    right: Tensor = args[-1]
    return 2 * result.numel() * right.shape[-2]


def _count_convolution_flops(args: Sequence[Any], result: Tensor) -> int:
    inputs, weight, transposed = args[0], args[1], args[6]
    return _count_flops_over_positions(inputs if transposed else result, weight)


def _count_convolution_backward_flops(args: Sequence[Any], result: object) -> int:
    """Return the FLOPs of the gradients of input and weight. Each gradient takes as many FLOPs as the forward pass."""
    gradient, inputs, weight, transposed, output_mask = *args[:3], args[7], args[10]
    return _count_flops_over_positions(inputs if transposed else gradient, weight) * sum(map(bool, output_mask[:2]))


def _count_flops_over_positions(output: Tensor, weight: Tensor) -> int:
    return 2 * len(output) * math.prod(output.shape[2:]) * weight.numel()


_FORMULAS: Final[Mapping[Any, Callable[[Sequence[Any], Any], int]]] = {
    torch.ops.aten.mm: _count_matmul_flops,
    torch.ops.aten.bmm: _count_matmul_flops,
    torch.ops.aten.addmm: _count_matmul_flops,
    torch.ops.aten.baddbmm: _count_matmul_flops,
    torch.ops.aten.convolution: _count_convolution_flops,
    torch.ops.aten.convolution_backward: _count_convolution_backward_flops,
}
