"""Host memory: memory that a process keeps for its next step, and pinned memory for copies to and from a GPU.

A step frees its activations and gradients, and the next step needs the same number of bytes. By default, glibc returns
free memory at the end of the heap to the kernel, which then has to find and clear each page again.
"""

import ctypes
from typing import Final

import torch
from torch import Tensor

_M_TRIM_THRESHOLD: Final = -1  # of <malloc.h>
_M_MMAP_THRESHOLD: Final = -3
_NEVER: Final = 2**31 - 1
_LARGEST_BYTES: Final = 32 << 20  # the maximum of glibc; larger blocks always go back to the system


def keep_freed_memory() -> None:
    """Keep freed memory in this process and in its forks. Has no effect with a C library other than glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)


def host_like(tensor: Tensor) -> Tensor:
    """Return an uninitialized CPU tensor for a copy of `tensor`, pinned if `tensor` is on a GPU for fast copies.

    Call this function for each copy. Copies record an event in pinned memory, and torch only reuses the memory when
    these copies are done (CachingHostAllocator). Therefore no buffer is overwritten while a stream still reads it.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
