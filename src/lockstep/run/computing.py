"""The device that a rank computes on, made ready for it."""

import torch

from lockstep.comm.world import choose_device
from lockstep.common.rank import RankInfo
from lockstep.config.placement import Placement
from lockstep.core.precision import Precision
from lockstep.device.env_flags import check_switches
from lockstep.device.memory import keep_freed_memory
from lockstep.device.precision import fix_kernels


def computing_device(placement: Placement, info: RankInfo, threads: int, precision: Precision) -> torch.device:
    """Return the device of a rank, whose kernels, threads and memory are set from here on for the whole process.

    What of the environment would change the bits on a GPU raises UsageError.
    """
    device = choose_device(placement.device, info, placement.backend)
    fix_kernels(threads, precision, device)
    keep_freed_memory()
    if device.type == "cuda":
        check_switches(precision)
    return device
