"""Why a program finds no card that it can use: from what was looked at, the reasons in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lockstep.device.nvidia_smi import Card, is_older


@dataclass(frozen=True)
class Evidence:
    """What was looked at on this host.

    `kernel` is the driver in the kernel, "" where there is none; `files` says of each of its device files whether this
    user may open it; `library` is why libcuda cannot be loaded; `smi` why nvidia-smi gave no answer; `raised` what
    torch said when CUDA did not start: all three are "" where nothing is wrong.
    """

    torch: str
    torch_cuda: str | None
    kernel: str
    files: Mapping[str, bool]
    library: str
    smi: str
    driver_cuda: str
    cards: tuple[Card, ...]
    visible: str | None
    devices: int
    raised: str


def reasons(found: Evidence) -> list[str]:
    """Return why no card can be used, each with what to do; empty where torch has a device."""
    return [] if found.devices and not found.raised else list(_reasons(found))


def _reasons(found: Evidence) -> Iterator[str]:
    told = False
    for reason in (*_of_torch(found), *_of_driver(found), *_of_rights(found), *_of_choice(found)):
        told = True
        yield reason
    if found.raised and not told:
        yield f"CUDA does not start: {found.raised}"
    elif not told:
        yield "torch finds no card, and nothing of what was looked at says why"


def _of_torch(found: Evidence) -> Iterator[str]:
    if found.torch_cuda is None:
        yield f"torch {found.torch} is built without CUDA; install one with CUDA (https://pytorch.org/get-started)"
    elif is_older(found.driver_cuda, found.torch_cuda):
        yield (
            f"the driver knows CUDA up to {found.driver_cuda}, and torch {found.torch} is built with CUDA "
            f"{found.torch_cuda}; install a newer driver, or a torch for CUDA {found.driver_cuda.partition('.')[0]}"
        )


def _of_driver(found: Evidence) -> Iterator[str]:
    loaded = bool(found.kernel or found.files)
    if found.library and not loaded:
        yield (
            "no driver: neither /proc/driver/nvidia/version nor /dev/nvidia* nor libcuda.so.1 is there; install "
            "NVIDIA's, or start the container with its cards (docker run --gpus all)"
        )
    elif loaded and not any(name.removeprefix("/dev/nvidia").isdecimal() for name in found.files):
        yield "the driver is loaded, but no card has a device file (/dev/nvidia0); in a container or job, ask for cards"
    elif found.library:
        yield f"the driver is loaded, but not its library: {found.library}; install the one of the same version"
    elif found.smi:
        yield f"nvidia-smi does not answer: {found.smi}"


def _of_rights(found: Evidence) -> Iterator[str]:
    closed = sorted(name for name, opens in found.files.items() if not opens)
    if closed:
        yield f"this user may not open {', '.join(closed)}; see whose they are (ls -l /dev/nvidia*)"


def _of_choice(found: Evidence) -> Iterator[str]:
    if found.visible is not None and found.visible.strip() in ("", "-1", "NoDevFiles"):
        yield f"CUDA_VISIBLE_DEVICES is {found.visible!r}, which hides all cards; unset it, or ask for cards"
    elif found.visible is not None and found.cards and not found.devices:
        yield f"CUDA_VISIBLE_DEVICES={found.visible} names none of the {len(found.cards)} cards here; see nvidia-smi -L"
    taken = [card for card in found.cards if card.mode == "Exclusive_Process" and card.users]
    if found.cards and len(taken) == len(found.cards):
        yield f"all cards are in use exclusively: {'; '.join(user for card in taken for user in card.users)}"
    if found.cards and all(card.mode == "Prohibited" for card in found.cards):
        yield "all cards are in compute mode Prohibited; nvidia-smi -c DEFAULT"
