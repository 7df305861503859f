"""Host memory: keeps freed memory for the next step, and allocates CPU tensors for copies of GPU tensors.

Each step frees its activations and gradients, and the next step allocates the same amount of memory. By default, glibc
returns free memory at the end of the heap to the kernel, which then has to find and clear each page again.
"""

import ctypes
from typing import Final

import torch
from torch import Tensor

# Constants from <malloc.h>.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_NEVER_TRIM: Final = 2**31 - 1
_MAX_THRESHOLD_BYTES: Final = 32 << 20  # the maximum in glibc; larger blocks are always returned to the kernel


def keep_freed_memory() -> None:
    """Keep freed memory in this process and its forks, instead of returning it to the kernel.

    This is a no-op if the C library isn't glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)
        mallopt(_M_MMAP_THRESHOLD, _MAX_THRESHOLD_BYTES)


def empty_host_tensor(tensor: Tensor) -> Tensor:
    """Return an uninitialized CPU tensor for a copy of `tensor`, in pinned memory if `tensor` is on a GPU.

    Call this function for each copy instead of reusing a buffer. A copy records an event on pinned memory, and torch's
    CachingHostAllocator only reuses the memory once the copy is complete. Therefore, no buffer is overwritten while a
    stream still reads it.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
