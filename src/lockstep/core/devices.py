"""Selects the device of each process, and the backend that transfers tensors between processes."""

from typing import Final, Literal

from lockstep.common.text import format_count
from lockstep.errors import UsageError

Backend = Literal["auto", "nccl", "gloo"]

SHARING: Final = "placement.backend=gloo, which lets processes share a device"
GLOO_NOTE: Final = "gloo communicates through host memory: the same bits, at a different speed"


def check_cuda(device: Literal["auto", "cpu", "cuda"], device_count: int) -> None:
    """Raise UsageError if `device` is cuda, but there is no CUDA device."""
    if device == "cuda" and not device_count:
        raise UsageError(
            "placement.device: cuda is not available, because torch finds no CUDA device; use cpu or auto, or run "
            "lockstep doctor gpu to find the cause"
        )


def resolve_backend(backend: Backend, on_gpu: bool) -> Literal["nccl", "gloo"]:
    """Return the backend that transfers tensors between ranks. Raises UsageError for nccl on the CPU."""
    if backend == "nccl" and not on_gpu:
        raise UsageError(
            "placement.backend: nccl does not support CPU tensors, and this run is on the CPU; use auto or gloo"
        )
    if backend == "auto":
        return "nccl" if on_gpu else "gloo"
    return backend


def describe_backend(backend: Backend, device: Literal["auto", "cpu", "cuda"]) -> str:
    """Describe the communication backend for the user. Doesn't query the devices."""
    if device == "cpu":
        return "with gloo"
    if backend == "gloo":
        return "with gloo; on CUDA, the processes of a host use its devices in turn, and may share a device"
    nccl = "with NCCL, each process on a separate CUDA device"
    return nccl if backend == "nccl" or device == "cuda" else f"{nccl}; without CUDA, with gloo"


def choose_device_index(
    num_visible: int, local_rank: int, local_size: int, is_hidden: bool, allow_sharing: bool = False
) -> int:
    """Return the index of the device of this process. `num_visible` is the number of visible devices, at least 1.

    Usually, all processes on a host see the same devices, and each process uses a separate device. If `allow_sharing`
    is set, devices are assigned round-robin, so several processes can use the same device. If the launcher hides
    devices from the process (`is_hidden`) and only one is visible, the process uses it. Raises UsageError on all ranks
    if there are too few devices.
    """
    if num_visible >= local_size or allow_sharing:
        return local_rank % num_visible
    if num_visible == 1 and is_hidden:
        return 0
    raise UsageError(
        f"placement.processes: {local_size} processes on this host but only "
        f"{format_count(num_visible, 'CUDA device')}; use at most {num_visible}, or placement.device=cpu, or "
        f"{SHARING}, or let the launcher show each process only its own device "
        f"(CUDA_VISIBLE_DEVICES, as with srun --gpus-per-task=1)"
    )


def find_shared_devices(owners: dict[int, str]) -> list[list[int]]:
    """Return the groups of ranks that share a device. `owners` maps each rank to the name of its device."""
    by_device: dict[str, list[int]] = {}
    for rank, device in sorted(owners.items()):
        by_device.setdefault(device, []).append(rank)
    return [ranks for ranks in by_device.values() if len(ranks) > 1]
