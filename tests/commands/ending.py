"""Losses that end a process."""

import ctypes
import os
import resource
from pathlib import Path

from torch import Tensor
from torch.nn import functional


def crashing(outputs: Tensor, targets: Tensor) -> Tensor:
    """The last rank crashes in native code once training has begun."""
    last = int(os.environ.get("WORLD_SIZE", "1")) - 1
    if os.environ.get("RANK", "0") == str(last) and outputs.requires_grad:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)
    return functional.cross_entropy(outputs, targets, reduction="sum")


def looking(outputs: Tensor, targets: Tensor) -> Tensor:
    """Every rank fails once training has begun, and says whether the run has a result by then."""
    if outputs.requires_grad:
        raise ValueError(f"result.json is there: {Path('run', 'result.json').exists()}")
    return functional.cross_entropy(outputs, targets, reduction="sum")


def leaving(outputs: Tensor, targets: Tensor) -> Tensor:
    """Every rank leaves, as if all were well, once training has begun."""
    if outputs.requires_grad:
        os._exit(0)
    return functional.cross_entropy(outputs, targets, reduction="sum")
