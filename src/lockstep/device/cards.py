"""Collects information about the GPUs of this host from NVML, the device files of the driver, and torch.

This module follows the NVML documentation. It has not been tested on a host with GPUs yet.
"""

import ctypes
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from lockstep.common.plainfile import read_text_or_empty
from lockstep.device.ports import get_command_line

_ROOT: Final = Path("/")
_MODES: Final = {0: "Default", 2: "Prohibited", 3: "Exclusive_Process"}
# The NVML reasons for reduced clocks that are a problem. An idle GPU and clocks that a user has limited aren't.
_SLOWDOWN_REASONS: Final[Mapping[str, str]] = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "slowdown by hardware",
    "SwThermalSlowdown": "heat",
    "HwThermalSlowdown": "heat, by hardware",
    "HwPowerBrakeSlowdown": "the host's power supply",
}


@dataclass(frozen=True)
class NvmlDevice:
    """A GPU as reported by NVML. `bus` is its PCI address in sysfs format.

    Fields are None if the GPU or its driver doesn't report them.
    """

    name: str
    uuid: str
    bus: str = ""
    memory_mib: int | None = None
    mode: str = "Default"
    users: tuple[str, ...] = ()  # processes that compute on the GPU
    mig: bool = False
    ecc: bool | None = None
    persistence: bool | None = None
    uncorrected: int = 0  # uncorrected memory errors since the driver was loaded
    uncorrected_ever: int = 0
    repair: tuple[str, ...] = ()  # pending or failed memory repairs
    clock_limits: tuple[str, ...] = ()  # reasons why the clocks are currently reduced
    power_limit_w: float | None = None
    power_default_w: float | None = None
    link_width: int | None = None
    link_width_max: int | None = None


@dataclass(frozen=True)
class NvmlResult:
    """The result of querying NVML. If the query failed, `problem` is the error.

    `cuda` is the newest CUDA version that the driver supports.
    """

    version: str = ""
    cuda: str = ""
    cards: tuple[NvmlDevice, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class CudaDevice:
    """A CUDA device as reported by torch. It can access the memory of the devices `peer_devices` directly."""

    name: str
    uuid: str
    memory_bytes: int
    capability: str
    peer_devices: tuple[int, ...]


@dataclass(frozen=True)
class GpuInfo:
    """The results of all GPU queries on this host.

    - `kernel`: the version line of the kernel driver, or "" if no driver is loaded.
    - `libraries`: the versions of torch, CUDA, cuDNN and NCCL, or None for libraries that torch is built without.
    - `files`: whether the current user can open each device file of the driver.
    - `library`: the error that loading libcuda raised, or "".
    - `visible`: the value of CUDA_VISIBLE_DEVICES, or None if it isn't set.
    - `cuda_error`: the error that torch raised when it initialized CUDA, or "".
    """

    driver: NvmlResult
    libraries: Mapping[str, str | None]
    kernel: str
    files: Mapping[str, bool]
    library: str
    visible: str | None
    devices: tuple[CudaDevice, ...]
    cuda_error: str


def collect_gpu_info(driver: NvmlResult, root: Path = _ROOT) -> GpuInfo:
    """Collect all other information about the GPUs, and return it together with `driver`. Initializes CUDA."""
    device_count, cuda_error = _start_cuda()
    version = read_text_or_empty(root / "proc/driver/nvidia/version")
    return GpuInfo(
        driver=driver,
        libraries=_get_library_versions(),
        kernel=version.partition("\n")[0].removeprefix("NVRM version:").strip(),
        files=_check_device_files(root / "dev"),
        library=_find_libcuda_error(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        devices=() if cuda_error else tuple(_query_device(index, device_count) for index in range(device_count)),
        cuda_error=cuda_error,
    )


def query_nvml() -> NvmlResult:
    """Query the driver and its GPUs through NVML. Call this with a timeout, because it blocks if the driver hangs."""
    import pynvml as nvml  # imported here because most hosts have no GPU

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return NvmlResult(problem=str(error))
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        cards = tuple(_query_card(nvml, handle) for handle in handles)
        return NvmlResult(nvml.nvmlSystemGetDriverVersion(), f"{cuda // 1000}.{cuda % 1000 // 10}", cards)
    except nvml.NVMLError as error:  # for example, a GPU has fallen off the bus
        return NvmlResult(problem=str(error))
    finally:
        nvml.nvmlShutdown()


def _query_card(nvml: Any, handle: Any) -> NvmlDevice:
    def get(query: str, *arguments: int) -> Any:
        """Return the result of an NVML query, or None if the GPU or its driver doesn't support the query."""
        try:
            return getattr(nvml, f"nvmlDeviceGet{query}")(handle, *arguments)
        except nvml.NVMLError:
            return None

    def count_ecc_errors(counter: int) -> int:
        return get("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, counter) or 0

    def query_watts(query: str) -> float | None:
        milliwatts = get(query)
        return None if milliwatts is None else milliwatts / 1000

    address, memory, ecc, persistence = get("PciInfo"), get("MemoryInfo"), get("EccMode"), get("PersistenceMode")
    _, _, pending, failed = get("RemappedRows") or (0, 0, 0, 0)
    repair = {
        "rows to be remapped at the next reset": pending,
        "a row that could not be remapped": failed,
        "pages to be retired at the next reset": get("RetiredPagesPendingStatus"),
    }
    clock_reasons = get("CurrentClocksEventReasons") or 0
    return NvmlDevice(
        name=nvml.nvmlDeviceGetName(handle),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        bus=to_sysfs_address(address.busId) if address else "",
        memory_mib=memory.total >> 20 if memory else None,
        mode=_MODES.get(get("ComputeMode"), ""),
        users=tuple(
            f"pid {process.pid} ({get_command_line(process.pid)})" for process in get("ComputeRunningProcesses") or ()
        ),
        mig=bool((get("MigMode") or [0])[0]),
        ecc=None if ecc is None else bool(ecc[0]),
        persistence=None if persistence is None else bool(persistence),
        uncorrected=count_ecc_errors(nvml.NVML_VOLATILE_ECC),
        uncorrected_ever=count_ecc_errors(nvml.NVML_AGGREGATE_ECC),
        repair=tuple(reason for reason, is_due in repair.items() if is_due),
        clock_limits=tuple(
            reason
            for name, reason in _SLOWDOWN_REASONS.items()
            if clock_reasons & getattr(nvml, f"nvmlClocksEventReason{name}")
        ),
        power_limit_w=query_watts("EnforcedPowerLimit"),
        power_default_w=query_watts("PowerManagementDefaultLimit"),
        link_width=get("CurrPcieLinkWidth"),
        link_width_max=get("MaxPcieLinkWidth"),
    )


def to_sysfs_address(pci_address: str) -> str:
    """Convert a PCI address to the format of sysfs, for example 00000000:9D:00.0 to 0000:9d:00.0."""
    domain, colon, remainder = pci_address.lower().partition(":")
    return f"{domain[-4:]}{colon}{remainder}"


def _query_device(index: int, device_count: int) -> CudaDevice:
    properties = torch.cuda.get_device_properties(index)
    other_indices = [other for other in range(device_count) if other != index]
    capability = f"{properties.major}.{properties.minor}"
    peer_devices = tuple(other for other in other_indices if torch.cuda.can_device_access_peer(index, other))
    return CudaDevice(properties.name, str(properties.uuid), properties.total_memory, capability, peer_devices)


def _get_library_versions() -> dict[str, str | None]:
    """Return the versions of torch and its GPU libraries, or None for libraries that torch is built without."""
    has_cuda = torch.version.cuda is not None
    cudnn = torch.backends.cudnn.version() if has_cuda else None  # type: ignore[no-untyped-call]
    return {
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
        "cuDNN": None if cudnn is None else str(cudnn),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda else None,  # type: ignore[no-untyped-call]
    }


def _check_device_files(folder: Path) -> dict[str, bool]:
    """Return a dict with each device file of the driver, and whether the current user can open it."""
    files = [folder / "nvidiactl", folder / "nvidia-uvm", *folder.glob("nvidia[0-9]*")]
    return {f"/dev/{file.name}": os.access(file, os.R_OK | os.W_OK) for file in sorted(files) if file.exists()}


def _find_libcuda_error() -> str:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    return ""


def _start_cuda() -> tuple[int, str]:
    """Initialize CUDA. Returns the number of devices that torch finds, and the error, or "" if there was none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.cuda.init below raises an error for the same problem
        count = torch.cuda.device_count()
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:  # torch raises AssertionError if it is built without CUDA
            return count, str(error).partition("\n")[0]
    return count, ""
