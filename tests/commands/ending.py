"""A loss that ends a process in a way that leaves no time for words."""

import ctypes
import os

from torch import Tensor
from torch.nn import functional


def crashing(outputs: Tensor, targets: Tensor) -> Tensor:
    """The last rank crashes in native code once training has begun."""
    last = int(os.environ.get("WORLD_SIZE", "1")) - 1
    if os.environ.get("RANK", "0") == str(last) and outputs.requires_grad:
        ctypes.string_at(0)
    return functional.cross_entropy(outputs, targets, reduction="sum")
