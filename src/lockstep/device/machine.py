"""Describes the machine of a run: a full record, and a fingerprint of everything that affects the bits."""

import hashlib
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from lockstep.common.hashing import get_hash_seed
from lockstep.common.importing import get_version
from lockstep.common.platforms import count_usable_cores
from lockstep.device.compiler import make_compiler_fingerprint
from lockstep.device.env_flags import read_env_flags
from lockstep.device.precision import list_attention_backends

_PACKAGES: Final = ("lockstep-train", "torch", "torchvision", "timm", "numpy", "pillow", "safetensors")
# Instruction sets that libraries use to select kernels.
_X86: Final = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni")
_X86_LOW_PRECISION: Final = ("avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16")
_ARM: Final = ("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2")
_LINUX_CPUINFO: Final = Path("/proc/cpuinfo")
_HASH_DIGITS: Final = 12  # hex digits of a hash; enough to avoid collisions


def describe_environment() -> dict[str, Any]:
    """Return a JSON-serializable record of this machine, which is saved in the run folder.

    Versions are read from package metadata, so packages aren't imported. Environment variables are excluded, because
    they can contain secrets. This function initializes CUDA if there are GPUs, so don't call it in a process that forks
    later.
    """
    return {
        "argv": sys.argv,
        "python": platform.python_version(),
        "packages": {name: get_version(name) for name in _PACKAGES},
        "os": platform.platform(),
        "host": socket.gethostname(),
        "cpu": _describe_cpu(),
        "gpus": _describe_gpus(),
        "git": _describe_git(Path.cwd()),
    }


def make_fingerprint(device: torch.device, *, compiled: bool = False) -> dict[str, Any]:
    """Return the fingerprint of this machine: everything besides the recipe that affects the bits.

    Two runs of a recipe with equal fingerprints have the same bits. If `compiled` is set, the fingerprint includes the
    compiler and its settings. On the CPU, it includes the CPU model, because libraries choose the block sizes of sums
    by the cache sizes, which can differ between CPUs with the same instruction set.
    """
    fingerprint: dict[str, Any] = {
        "torch": str(torch.__version__),
        "device": device.type,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "switches": read_env_flags(device),
        "hash_seed": get_hash_seed(),
    }
    if compiled:
        fingerprint |= make_compiler_fingerprint(on_gpu=device.type == "cuda")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        products = torch.backends.cuda.matmul.fp32_precision
        return (
            fingerprint
            | {"gpu": name, "attention": list_attention_backends(), "fp32_products": products}
            | _get_gpu_libraries()
        )
    return fingerprint | {"cpu": _read_cpuinfo().get("model name", platform.machine())}


def hash_source() -> str:
    """Return a hash of Lockstep's source code, because checkouts of the same version can differ. Takes 6 ms."""
    package = Path(__file__).parent.parent
    sha256 = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        sha256.update(f"{file.relative_to(package).as_posix()}\0".encode() + file.read_bytes())
    return sha256.hexdigest()[:_HASH_DIGITS]


def describe_fingerprint_differences(previous: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the differences between two fingerprints, such as `threads: 1 before, 2 now`."""
    return [
        f"{name}: {previous.get(name, 'nothing')} before, {current.get(name, 'nothing')} now"
        for name in sorted({*previous, *current})
        if previous.get(name) != current.get(name)
    ]


def _describe_cpu() -> dict[str, Any]:
    info = _read_cpuinfo()
    flags = (info.get("flags") or info.get("Features") or "").split()
    return {
        "model": info.get("model name", platform.processor() or platform.machine()),
        "cores": os.cpu_count(),
        "cores_usable": count_usable_cores(),
        "features": sorted({*_X86, *_X86_LOW_PRECISION, *_ARM}.intersection(flags)),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _read_cpuinfo() -> dict[str, str]:
    """Return the entries of the first processor in /proc/cpuinfo, or {} if the file doesn't exist."""
    if not _LINUX_CPUINFO.exists():
        return {}
    first, _, _ = _LINUX_CPUINFO.read_text().partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _describe_gpus() -> list[dict[str, Any]]:
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"name": gpu.name, "bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}", **_get_gpu_libraries()}
        for gpu in properties
    ]


def _get_gpu_libraries() -> dict[str, Any]:
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {"cuda": torch.version.cuda, "cudnn": cudnn}


def _describe_git(folder: Path) -> dict[str, Any] | None:
    """Return the commit of `folder` and whether there are uncommitted changes, or None if it isn't in a repository."""
    commit = _run_git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _run_git(folder, "status", "--porcelain")
    return {"commit": commit.strip(), "dirty": None if changes is None else bool(changes)}


def _run_git(folder: Path, *arguments: str) -> str | None:
    # The timeout prevents a repository on a slow network file system from delaying a run.
    command = ["git", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout
