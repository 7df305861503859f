"""Which of the devices that a process sees is its own, and what carries tensors between them."""

from typing import Final, Literal

from lockstep.errors import UsageError

Backend = Literal["auto", "nccl", "gloo"]

SHARING: Final = "placement.backend=gloo, which lets processes share a device"
SLOWLY: Final = "gloo carries what they exchange through the host's memory: the same bits, at another speed"


def check_cuda(device: Literal["auto", "cpu", "cuda"], count: int) -> None:
    """Raise UsageError where CUDA is asked for, and there are no such devices."""
    if device == "cuda" and not count:
        raise UsageError(
            "placement.device: cuda asked for, but torch finds no CUDA device here; use cpu or auto; "
            "lockstep doctor gpu says why"
        )


def resolve_backend(backend: Backend, on_gpu: bool) -> Literal["nccl", "gloo"]:
    """Return what carries tensors between ranks; NCCL without a CUDA device raises UsageError."""
    if backend == "nccl" and not on_gpu:
        raise UsageError(
            "placement.backend: nccl asked for, but this run is on the CPU, whose tensors NCCL does not carry; "
            "use auto or gloo"
        )
    if backend == "auto":
        return "nccl" if on_gpu else "gloo"
    return backend


def in_words(backend: Backend, device: Literal["auto", "cpu", "cuda"]) -> str:
    """Say what will carry tensors between several processes, as far as it is known without a look at the devices."""
    if device == "cpu":
        return "by gloo"
    if backend == "gloo":
        return "by gloo; on CUDA, processes of a host take its devices in turn, and may share one"
    nccl = "by NCCL, each process on a CUDA device of its own"
    return nccl if backend == "nccl" or device == "cuda" else f"{nccl}; without CUDA by gloo"


def device_number(visible: int, local_rank: int, local_size: int, hidden: bool, sharing: bool = False) -> int:
    """Return the number of this process's device among the `visible` ones that it sees, of which there is at least one.

    Usually all processes of a host see the same devices and take one each; with `sharing` they take turns. A process
    that sees a single one takes that where others are `hidden` from it: the launcher gave each process its own. Too few
    raise UsageError on all ranks.
    """
    if visible >= local_size or sharing:
        return local_rank % visible
    if visible == 1 and hidden:
        return 0
    see = "1 CUDA device" if visible == 1 else f"{visible} CUDA devices"
    raise UsageError(
        f"placement.processes: {local_size} processes on this host but {see}; use at most {visible}, or "
        f"placement.device=cpu, or {SHARING}, or let the launcher show each process one device of its own "
        f"(CUDA_VISIBLE_DEVICES, as srun --gpus-per-task=1 does)"
    )


def find_shared_devices(owners: dict[int, str]) -> list[list[int]]:
    """Return the ranks that have one device between them; `owners` has a name for each rank's device."""
    by_device: dict[str, list[int]] = {}
    for rank, device in sorted(owners.items()):
        by_device.setdefault(device, []).append(rank)
    return [ranks for ranks in by_device.values() if len(ranks) > 1]
