"""Memory of the host: what a process keeps of it for its next step, and what a GPU copies from and to.

A step frees its activations and gradients, and the next one wants as many bytes again. What is free at the end of its
heap glibc hands back to the kernel, which then has to find and clear every page anew.
"""

import ctypes
from typing import Final

import torch
from torch import Tensor

_M_TRIM_THRESHOLD: Final = -1  # of <malloc.h>
_M_MMAP_THRESHOLD: Final = -3
_NEVER: Final = 2**31 - 1
_LARGEST_BYTES: Final = 32 << 20  # the most glibc takes; larger blocks go back to the system in any case


def keep_freed_memory() -> None:
    """Let this process, and those it forks, keep what they free. Another C library than glibc is left as it is."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)


def host_like(tensor: Tensor) -> Tensor:
    """Return memory of the CPU for a copy of `tensor`, pinned where that is a GPU's: copied at the speed of the bus.

    Fresh each time: torch hands out pinned memory again only when the copies from and to it are done, since each of
    them leaves an event there (CachingHostAllocator), so no buffer is written to while a stream still reads it.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
