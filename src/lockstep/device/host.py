"""Collects information about this host as JSON: versions, devices, memory and environment variables."""

import os
import platform
import re
import socket
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final

import psutil
import torch

from lockstep.common.control_groups import read_memory_limit
from lockstep.common.importing import get_version
from lockstep.common.platforms import has_gpu_driver
from lockstep.common.version import __version__
from lockstep.device import machine

_PACKAGE: Final = "lockstep-train"
_TEST_EXTRA: Final = re.compile(r"extra == ['\"]test['\"]")
_VISIBLE_VARIABLES: Final = re.compile(
    r"(OMP|KMP|MKL|OPENBLAS|GLOO|NCCL|CUDA|CUBLAS|CUBLASLT|NVIDIA|TORCH|PYTORCH|TP|ATEN|ONEDNN|DNNL|MALLOC|TIMM)_.*"
    r"|PYTHONHASHSEED|LD_PRELOAD|DISABLE_ADDMM_CUDA_LT"
)
_SECRET_VARIABLES: Final = re.compile("KEY|_TOK|SECRET|PASS", re.IGNORECASE)


def get_host_info() -> dict[str, Any]:
    """Return the versions, the fingerprint, the devices and the environment variables of this host.

    Takes about 100 ms, and initializes CUDA if there is a GPU.
    """
    return {
        "host": socket.gethostname(),
        "versions": get_versions(),
        "numerics": _make_host_fingerprint(),
        "cards": get_gpu_names(),
        "variables": get_env_variables(os.environ),
    }


def get_versions() -> dict[str, str | None]:
    """Return the versions of Python, Lockstep, and its required and optional packages (None if not installed)."""
    required = [requirement for requirement in metadata.requires(_PACKAGE) or [] if not _TEST_EXTRA.search(requirement)]
    names = {re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0] for requirement in required} - {_PACKAGE}
    source = machine.hash_source()
    own_versions = {"python": platform.python_version(), "lockstep": __version__, "lockstep's source": source}
    return own_versions | {name: get_version(name) for name in sorted(names)}


def _make_host_fingerprint() -> dict[str, Any]:
    """Return the fingerprint of the first device, without the number of threads."""
    device = torch.device("cuda", 0) if torch.cuda.device_count() else torch.device("cpu")
    return {name: value for name, value in machine.make_fingerprint(device).items() if name != "threads"}


def get_gpu_names() -> dict[str, Any]:
    """Return the names of the CUDA devices that torch finds, and whether a GPU driver is present."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"devices": names, "driver": has_gpu_driver()}


def get_memory_info() -> dict[str, int | None]:
    """Return the total memory, the available memory, and the memory limit of the container, in bytes."""
    current = psutil.virtual_memory()
    return {"all": current.total, "free": current.available, "limit": read_memory_limit()}


def get_env_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of compute and communication libraries, without those that may be secrets."""
    return {
        name: env[name]
        for name in sorted(env)
        if _VISIBLE_VARIABLES.fullmatch(name) and not _SECRET_VARIABLES.search(name)
    }
