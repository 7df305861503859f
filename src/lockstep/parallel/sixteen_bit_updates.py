"""16-bit weight updates on the CPU that don't depend on the position of an element in its tensor.

For fp16 and bf16, torch's CPU kernel for a + alpha b rounds once for elements that fill a vector register, and twice
for the remaining elements at the end of the tensor (torch 2.15). The rows of a sharded tensor end at different elements
than the full tensor, so the results would have different bits.
"""

from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES_16_BIT: Final = (torch.bfloat16, torch.float16)
_ATEN: Final = torch.ops.aten
_ADDS: Final = frozenset({_ATEN.add.Tensor, _ATEN.add_.Tensor})
_ADDS_OF_LISTS: Final = frozenset({_ATEN._foreach_add.List, _ATEN._foreach_add_.List})
_IN_PLACE: Final = frozenset({_ATEN.add_.Tensor, _ATEN._foreach_add_.List})


@final
class PositionIndependentMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that computes a + alpha b in float32 and rounds once, for 16-bit tensors on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        alpha = (kwargs or {}).get("alpha", 1)
        if alpha == 1 or func not in _ADDS | _ADDS_OF_LISTS:
            return func(*args, **(kwargs or {}))
        left, right = (args[0], args[1]) if func in _ADDS_OF_LISTS else ([args[0]], [args[1]])
        if not all(is_16_bit_on_cpu(tensor) for tensor in left):
            return func(*args, **kwargs)
        sums = [_add_scaled(*pair, alpha) for pair in zip(left, right, strict=True)]
        if func in _IN_PLACE:
            for tensor, total in zip(left, sums, strict=True):
                tensor.copy_(total)
            return None if func in _ADDS_OF_LISTS else args[0]
        return sums if func in _ADDS_OF_LISTS else sums[0]


def is_16_bit_on_cpu(tensor: Tensor) -> bool:
    """Return whether a tensor has a 16-bit dtype and is on the CPU."""
    return tensor.device.type == "cpu" and tensor.dtype in DTYPES_16_BIT


def _add_scaled(left: Tensor, right: Tensor, alpha: float) -> Tensor:
    return left.float().add_(right.float(), alpha=alpha).to(left.dtype)
