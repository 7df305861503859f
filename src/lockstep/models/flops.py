"""What a model computes for a sample: its floating-point operations, forward and backward.

Those of products count: of matrices, convolutions and so of attention, which the meta device computes as products. A
multiplication and an addition are 2. Elementwise operations are not counted, as is customary for model FLOPs.

torch.utils.flop_counter has formulas too, and a table of modules, but imports Triton, which takes a third of a second;
and torch 2.15 counts the weight's gradient of a convolution in groups as often as there are groups.
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
    """Counts the operations of what is computed while it is entered, backward too; it may be entered again."""

    supports_higher_order_operators = True  # torch refuses them otherwise; what they compute is not seen

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `function` and count what it does."""
        result = function(*args, **(kwargs or {}))
        formula = _FORMULAS.get(getattr(function, "overloadpacket", None))
        if formula is not None:
            self.flops += formula(args, result)
        return result


def backward_flops(counter: FlopCounter, outputs: object) -> int | None:
    """Let `counter` count the backward from `outputs` too; return all it has, None where there is no backward."""
    learned = [tensor for tensor in tensors_of(outputs) if tensor.requires_grad]
    if not learned:
        return None
    try:
        with counter:
            torch.autograd.backward([tensor.sum() for tensor in learned])
    except Exception:  # a stranger's autograd function may need values, which the meta device has not
        return None
    return counter.flops


def _product(args: Sequence[Any], result: Tensor) -> int:
    """Count [..., n, k] times [..., k, m], whether it is added to something or not."""
    right: Tensor = args[-1]
    return 2 * result.numel() * right.shape[-2]


def _convolution(args: Sequence[Any], result: Tensor) -> int:
    inputs, weight, transposed = args[0], args[1], args[6]
    return _at_each_place(inputs if transposed else result, weight)


def _convolution_backward(args: Sequence[Any], result: object) -> int:
    """Count the gradients of inputs and weight: each takes as much as the forward."""
    gradient, inputs, weight, transposed, wanted = *args[:3], args[7], args[10]
    return _at_each_place(inputs if transposed else gradient, weight) * sum(map(bool, wanted[:2]))


def _at_each_place(places: Tensor, weight: Tensor) -> int:
    return 2 * len(places) * math.prod(places.shape[2:]) * weight.numel()


_FORMULAS: Final[Mapping[Any, Callable[[Sequence[Any], Any], int]]] = {
    torch.ops.aten.mm: _product,
    torch.ops.aten.bmm: _product,
    torch.ops.aten.addmm: _product,
    torch.ops.aten.baddbmm: _product,
    torch.ops.aten.convolution: _convolution,
    torch.ops.aten.convolution_backward: _convolution_backward,
}
