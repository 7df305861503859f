"""Counts the floating-point operations of a model per sample, forward and backward.

Only products count: matrix products and convolutions, and therefore attention, which the meta device computes as matrix
products. A multiplication and an addition are 2 operations. Elementwise operations are not counted, as usual for model
FLOPs.

torch.utils.flop_counter also has formulas, and a table of modules. However, it imports Triton, which takes a third of a
second. In addition, torch 2.15 counts the weight gradient of a grouped convolution once per group.
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
    """Counts the operations that run while it is entered, including backward. You can enter it several times."""

    supports_higher_order_operators = True  # otherwise torch raises; their operations are not counted

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `function` and count its operations."""
        result = function(*args, **(kwargs or {}))
        formula = _FORMULAS.get(getattr(function, "overloadpacket", None))
        if formula is not None:
            self.flops += formula(args, result)
        return result


def backward_flops(counter: FlopCounter, outputs: object) -> int | None:
    """Run backward from `outputs` under `counter`, and return its total, or None if backward can't run."""
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
    """Count [..., n, k] times [..., k, m], with or without a summand."""
    right: Tensor = args[-1]
    return 2 * result.numel() * right.shape[-2]


def _convolution(args: Sequence[Any], result: Tensor) -> int:
    inputs, weight, transposed = args[0], args[1], args[6]
    return _per_position(inputs if transposed else result, weight)


def _convolution_backward(args: Sequence[Any], result: object) -> int:
    """Count the gradients of inputs and weight. Each takes the same number of operations as the forward."""
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
