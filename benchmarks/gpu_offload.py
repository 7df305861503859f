"""What waits in the memory of the CPU changes no bit: runs with `offload` beside the same without it.

With SGD and clipping, and with AdamW, clipping and averaged weights: the CPU would round each of them otherwise than a
card does. What offloading takes of the card's memory, and of a step's time, is of the section `memory`.
"""

from typing import Any, Final

import torch

from benchmarks.gpu_exactness import compared, job_of, table

TRIED: Final[dict[str, tuple[str, ...]]] = {
    "digits fp32": ("single", "zero1 2, offloaded", "zero2 2, offloaded", "zero3 2, offloaded", "hsdp 4, offloaded"),
    "averaged fp32": ("single", "zero1 2, offloaded", "zero3 2, offloaded"),
    "averaged bf16": ("single", "zero1 2, offloaded"),
}
__all__ = ["run", "table"]


def run(device: torch.device, limit_s: float) -> dict[str, Any]:
    """See benchmarks/gpu.py."""
    return compared([job_of(recipe, name, device) for recipe in TRIED for name in TRIED[recipe]], device, limit_s)
