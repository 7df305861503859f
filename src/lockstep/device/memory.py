"""Memory that a process keeps for its next step, instead of giving it back to the system.

A step frees its activations and gradients, and the next one wants as many bytes again. What is free at the end of its
heap glibc hands back to the kernel, which then has to find and clear every page anew.
"""

import ctypes
from typing import Final

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
