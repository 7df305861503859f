"""The cards of this host: what NVML knows of them, the driver's files, and what torch makes of them.

Written from the documentation of NVML: it has not been run on a host with cards yet.
"""

import ctypes
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from lockstep.common.plainfile import shown_text
from lockstep.device.ports import command

_ROOT: Final = Path("/")
_MODES: Final = {0: "Default", 2: "Prohibited", 3: "Exclusive_Process"}
# Clocks are low without being held down where the card is idle, or as somebody chose.
_SLOWED: Final[Mapping[str, str]] = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "slowdown by hardware",
    "SwThermalSlowdown": "heat",
    "HwThermalSlowdown": "heat, by hardware",
    "HwPowerBrakeSlowdown": "the host's power supply",
}


@dataclass(frozen=True)
class Card:
    """One card; None is what it, or its driver, does not know. `bus` is its address as sysfs names it."""

    name: str
    uuid: str
    bus: str = ""
    memory_mib: int | None = None
    mode: str = "Default"
    users: tuple[str, ...] = ()  # processes that compute on it
    mig: bool = False
    ecc: bool | None = None
    persistence: bool | None = None
    uncorrected: int = 0  # errors of memory since the driver was loaded
    uncorrected_ever: int = 0
    repair: tuple[str, ...] = ()  # what of the memory waits to be repaired, or could not be
    slowed: tuple[str, ...] = ()  # why its clocks are held down now
    power_limit_w: float | None = None
    power_default_w: float | None = None
    link_width: int | None = None
    link_width_max: int | None = None


@dataclass(frozen=True)
class Driver:
    """What NVML reports. `cuda` is the newest CUDA that this driver knows; `problem` is why there is no answer."""

    version: str = ""
    cuda: str = ""
    cards: tuple[Card, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Device:
    """A device as torch numbers it; `reads` are those whose memory it may read directly."""

    name: str
    uuid: str
    memory_bytes: int
    capability: str
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Evidence:
    """All that was looked at on this host.

    `kernel` is the driver in the kernel, "" where there is none; `files` says of each of its device files whether this
    user may open it; `library` is why libcuda cannot be loaded, and `raised` what torch said when CUDA did not start:
    both are "" where nothing is wrong.
    """

    driver: Driver
    libraries: Mapping[str, str | None]
    kernel: str
    files: Mapping[str, bool]
    library: str
    visible: str | None
    devices: tuple[Device, ...]
    raised: str


def look(driver: Driver, root: Path = _ROOT) -> Evidence:
    """Return what `driver` said with all else there is to find. It starts CUDA."""
    count, raised = _start_cuda()
    version = shown_text(root / "proc/driver/nvidia/version")
    return Evidence(
        driver=driver,
        libraries=_libraries(),
        kernel=version.partition("\n")[0].removeprefix("NVRM version:").strip(),
        files=_files(root / "dev"),
        library=_library(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        devices=() if raised else tuple(_device(number, count) for number in range(count)),
        raised=raised,
    )


def ask_driver() -> Driver:
    """Ask NVML. A driver that hangs does not answer: call it with a limit."""
    import pynvml as nvml  # only now: most hosts have no card

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Driver(problem=str(error))
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        cards = tuple(_card(nvml, handle) for handle in handles)
        return Driver(nvml.nvmlSystemGetDriverVersion(), f"{cuda // 1000}.{cuda % 1000 // 10}", cards)
    except nvml.NVMLError as error:  # a card that fell off the bus
        return Driver(problem=str(error))
    finally:
        nvml.nvmlShutdown()


def _card(nvml: Any, handle: Any) -> Card:
    def get(question: str, *arguments: int) -> Any:
        """Return a card's answer, None where it has none or its driver does not know the question."""
        try:
            return getattr(nvml, f"nvmlDeviceGet{question}")(handle, *arguments)
        except nvml.NVMLError:
            return None

    def ecc_errors(counter: int) -> int:
        return get("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, counter) or 0

    def watts(question: str) -> float | None:
        milliwatts = get(question)
        return None if milliwatts is None else milliwatts / 1000

    address, memory, ecc, persistence = get("PciInfo"), get("MemoryInfo"), get("EccMode"), get("PersistenceMode")
    _, _, pending, failed = get("RemappedRows") or (0, 0, 0, 0)
    repair = {
        "rows to be remapped at the next reset": pending,
        "a row that could not be remapped": failed,
        "pages to be retired at the next reset": get("RetiredPagesPendingStatus"),
    }
    held_down = get("CurrentClocksEventReasons") or 0
    return Card(
        name=nvml.nvmlDeviceGetName(handle),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        bus=sysfs_address(address.busId) if address else "",
        memory_mib=memory.total >> 20 if memory else None,
        mode=_MODES.get(get("ComputeMode"), ""),
        users=tuple(f"pid {each.pid} ({command(each.pid)})" for each in get("ComputeRunningProcesses") or ()),
        mig=bool((get("MigMode") or [0])[0]),
        ecc=None if ecc is None else bool(ecc[0]),
        persistence=None if persistence is None else bool(persistence),
        uncorrected=ecc_errors(nvml.NVML_VOLATILE_ECC),
        uncorrected_ever=ecc_errors(nvml.NVML_AGGREGATE_ECC),
        repair=tuple(words for words, is_due in repair.items() if is_due),
        slowed=tuple(
            words for name, words in _SLOWED.items() if held_down & getattr(nvml, f"nvmlClocksEventReason{name}")
        ),
        power_limit_w=watts("EnforcedPowerLimit"),
        power_default_w=watts("PowerManagementDefaultLimit"),
        link_width=get("CurrPcieLinkWidth"),
        link_width_max=get("MaxPcieLinkWidth"),
    )


def sysfs_address(bus: str) -> str:
    """Return a PCI address as sysfs writes it: 0000:9d:00.0 for 00000000:9D:00.0."""
    domain, colon, rest = bus.lower().partition(":")
    return f"{domain[-4:]}{colon}{rest}"


def _device(number: int, count: int) -> Device:
    found = torch.cuda.get_device_properties(number)
    others = [other for other in range(count) if other != number]
    capability = f"{found.major}.{found.minor}"
    reads = tuple(other for other in others if torch.cuda.can_device_access_peer(number, other))
    return Device(found.name, str(found.uuid), found.total_memory, capability, reads)


def _libraries() -> dict[str, str | None]:
    """Return the versions of the libraries that compute on cards, as they came with torch."""
    built = torch.version.cuda is not None
    cudnn = torch.backends.cudnn.version() if built else None  # type: ignore[no-untyped-call]
    return {
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
        "cuDNN": None if cudnn is None else str(cudnn),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if built else None,  # type: ignore[no-untyped-call]
    }


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


def _start_cuda() -> tuple[int, str]:
    """Start CUDA; return how many devices torch sees, and its message if that failed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it raises what it warned of
        count = torch.cuda.device_count()
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:  # AssertionError: built without CUDA
            return count, str(error).partition("\n")[0]
    return count, ""
