"""Which of the devices that a process sees is its own."""

from __future__ import annotations

from lockstep.errors import UsageError


def device_number(visible: int, local_rank: int, local_size: int, hidden: bool) -> int:
    """Return the number of this process's device among the `visible` ones that it sees, of which there is at least one.

    Usually all processes of a host see the same devices and take one each. A process that sees a single one takes that
    where others are `hidden` from it: the launcher gave each process its own. Too few raise UsageError on all ranks.
    """
    if visible >= local_size:
        return local_rank
    if visible == 1 and hidden:
        return 0
    see = "1 CUDA device" if visible == 1 else f"{visible} CUDA devices"
    raise UsageError(
        f"placement.processes: {local_size} processes on this host but {see}; use at most {visible}, or "
        f"placement.device=cpu, or let the launcher show each process one device of its own (CUDA_VISIBLE_DEVICES, as "
        f"srun --gpus-per-task=1 does)"
    )


def shared(owners: dict[int, str]) -> list[list[int]]:
    """Return the ranks that have one device between them; `owners` has a name for each rank's device."""
    by_device: dict[str, list[int]] = {}
    for rank, device in sorted(owners.items()):
        by_device.setdefault(device, []).append(rank)
    return [ranks for ranks in by_device.values() if len(ranks) > 1]
