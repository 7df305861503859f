"""What this process has of its host: versions, devices, memory, variables; ready for JSON."""

import os
import platform
import re
import socket
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final

import psutil
import torch

from lockstep.common.control_groups import limit_bytes
from lockstep.common.importing import version_of
from lockstep.common.platforms import has_gpu_driver
from lockstep.common.version import __version__
from lockstep.device import machine

_PACKAGE: Final = "lockstep-train"
_FOR_TESTS: Final = re.compile(r"extra == ['\"]test['\"]")
_SHOWN: Final = re.compile(
    r"(OMP|KMP|MKL|OPENBLAS|GLOO|NCCL|CUDA|CUBLAS|CUBLASLT|NVIDIA|TORCH|PYTORCH|TP|ATEN|ONEDNN|DNNL|MALLOC|TIMM)_.*"
    r"|PYTHONHASHSEED|LD_PRELOAD|DISABLE_ADDMM_CUDA_LT"
)
_SECRET: Final = re.compile("KEY|_TOK|SECRET|PASS", re.IGNORECASE)


def facts() -> dict[str, Any]:
    """Return what this process finds of its host, in some 100 ms; with a GPU it starts CUDA."""
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "numerics": _numerics(),
        "cards": cards(),
        "variables": variables(os.environ),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of Python, Lockstep and each package that it can use, None for one that is not installed."""
    required = [each for each in metadata.requires(_PACKAGE) or [] if not _FOR_TESTS.search(each)]
    names = {re.split(r"[^A-Za-z0-9._-]", each, maxsplit=1)[0] for each in required} - {_PACKAGE}
    source = machine.source()
    found = {"python": platform.python_version(), "lockstep": __version__, "lockstep's source": source}
    return found | {name: version_of(name) for name in sorted(names)}


def _numerics() -> dict[str, Any]:
    """Return what decides the bits of a run on this rank's first device, but for the threads, which a recipe sets."""
    device = torch.device("cuda", 0) if torch.cuda.device_count() else torch.device("cpu")
    return {name: value for name, value in machine.numerics(device).items() if name != "threads"}


def cards() -> dict[str, Any]:
    """Return the CUDA devices that torch finds, and whether there is a driver of any."""
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"devices": names, "driver": has_gpu_driver()}


def memory() -> dict[str, int | None]:
    """Return bytes of memory: all, free for programs, and the least limit of a container."""
    now = psutil.virtual_memory()
    return {"all": now.total, "free": now.available, "limit": limit_bytes()}


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the libraries that compute and communicate, without any that may hold a secret."""
    return {name: env[name] for name in sorted(env) if _SHOWN.fullmatch(name) and not _SECRET.search(name)}
