"""Looks for cards: the driver's files, nvidia-smi, and what torch makes of them.

nvidia-smi is asked, not NVML by the package nvidia-ml-py, though that is well kept and light: this is looked at when
cards are sick, and a program that hangs with them can be given up after some seconds, where a call into a library could
not. It comes with the driver, so their versions agree, and what it prints can be kept as a test or sent in an issue.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from lockstep.device.no_card import Evidence
from lockstep.device.nvidia_smi import Driver, links, parse

_ROOT: Final = Path("/")
_ANSWER_S: Final = 20.0  # the first of a driver without persistence mode takes seconds for each card
_NOTHING: Final = Driver("", "", ())


def look(root: Path = _ROOT) -> tuple[Driver, Evidence]:
    """Return what the driver reports of its cards, and all reasons why none can be used. It starts CUDA."""
    printed, problem = smi("-q", "-x")
    driver = _NOTHING
    if not problem:
        try:
            driver = parse(printed)
        except ValueError as error:
            problem = f"what it printed is {error}"
    kernel, files = _kernel(root / "proc/driver/nvidia/version"), _files(root / "dev")
    devices, raised = _started()
    evidence = Evidence(
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        kernel=kernel,
        files=files,
        library=_library(),
        smi=problem,
        driver_cuda=driver.cuda,
        cards=driver.cards,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        devices=devices,
        raised=raised,
    )
    return driver, evidence


def smi(*words: str) -> tuple[str, str]:
    """Return what nvidia-smi prints, and why it gave no answer, "" where it did."""
    try:
        ran = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return "", f"none within {_ANSWER_S:.0f} s; the driver hangs: look for Xid in dmesg"
    except OSError as error:
        return "", f"it cannot be run: {error.strerror}"
    if ran.returncode:
        lines = [*ran.stdout.strip().splitlines(), *ran.stderr.strip().splitlines()]
        return "", f"{' '.join(lines[:3]) or 'no word'} (exit code {ran.returncode})"
    return ran.stdout, ""


def connections(cards: int) -> list[list[str]]:
    """Return how each two of so many cards are connected, empty where nvidia-smi does not say."""
    return links(smi("topo", "-m")[0], cards) if cards > 1 else []


def devices() -> list[dict[str, Any]]:
    """Return the devices that torch sees, in its order: what only CUDA knows of them."""
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [
        {
            "name": each.name,
            "uuid": str(each.uuid),
            "bytes": each.total_memory,
            "capability": f"{each.major}.{each.minor}",
            "processors": each.multi_processor_count,
        }
        for each in found
    ]


def peers() -> list[list[bool]]:
    """Return, for each two devices that torch sees, whether the first may read the memory of the second by itself."""
    numbers = range(torch.cuda.device_count())
    return [[one == other or torch.cuda.can_device_access_peer(one, other) for other in numbers] for one in numbers]


def libraries() -> dict[str, str | None]:
    """Return the versions of the libraries that compute on cards, as they came with torch."""
    built = torch.version.cuda is not None
    cudnn = torch.backends.cudnn.version() if built else None  # type: ignore[no-untyped-call]
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if built else None,  # type: ignore[no-untyped-call]
    }


def _kernel(file: Path) -> str:
    with suppress(OSError):
        return file.read_text().partition("\n")[0].removeprefix("NVRM version:").strip()
    return ""


def _files(folder: Path) -> dict[str, bool]:
    """Return the driver's device files, and whether this user may open each."""
    found = [folder / "nvidiactl", folder / "nvidia-uvm", *folder.glob("nvidia[0-9]*")]
    return {f"/dev/{file.name}": os.access(file, os.R_OK | os.W_OK) for file in sorted(found) if file.exists()}


def _library() -> str:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    return ""


def _started() -> tuple[int, str]:
    """Start CUDA; return how many devices torch sees, and its message if that failed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it raises what it warned of
        count = torch.cuda.device_count()
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:  # AssertionError: built without CUDA
            return count, str(error).partition("\n")[0]
    return count, ""
