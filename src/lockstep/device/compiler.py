"""Settings and checks for torch.compile, and the compiler's entries in the fingerprint of a run.

Kernels must never be selected by timing. The generated kernels depend on the compiler and on the settings of torch,
which about 200 environment variables can change. Therefore, both are part of the fingerprint of a run, and a run never
uses kernels that were built for a different fingerprint.
"""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from lockstep.common.importing import get_version
from lockstep.errors import UsageError

# Disable autotuning, because it could select different kernels on each rank and in each run.
COMPILE_OPTIONS: Final = {
    "deterministic": True,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "benchmark_fusion": False,
    "benchmark_combo_kernel": False,
    "triton.multi_kernel": 0,
    # Otherwise, a kernel is specialized for the alignment of its first inputs. The alignment depends on the placement:
    # tensors that a stage receives are aligned, but slices of a larger tensor may not be.
    "assume_aligned_inputs": True,
}

# Maximum number of compiled graphs per code object. Blocks of the same class share a code object, and each block needs
# a graph for each of about six shapes in training and in evaluation mode.
_RECOMPILE_LIMIT: Final = 4096
# If one of these variables is set, torch runs eagerly, which changes the bits.
_DISABLING_VARIABLES: Final = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
_TRITON_VARIABLES: Final = ("TRITON_F32_DEFAULT", "TRITON_INTERPRET", "TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH")
_CONFIGURED_SETTINGS: Final = ("force_non_lazy_backward_lowering", "suppress_errors")
_CACHE_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
_CACHE_PREFIX: Final = "lockstep-"
_MIN_CAPABILITY: Final = (7, 0)  # the lowest compute capability that Triton supports
_HASH_DIGITS: Final = 12  # hex digits of a hash; enough to avoid collisions


def check_compiler(on_gpu: bool) -> None:
    """Raise UsageError if torch.compile is disabled, or if the tools for building kernels are missing on this host."""
    for name in _DISABLING_VARIABLES:
        if os.environ.get(name, "0") not in ("", "0"):
            raise UsageError(
                f"recipe.compile: the environment variable {name}={os.environ[name]} disables torch.compile, which "
                f"changes the results; unset it, or set recipe.compile=false"
            )
    if on_gpu:
        _check_triton()
    elif shutil.which(_get_cxx_compiler()) is None:
        raise UsageError(
            f"recipe.compile: torch.compile on the CPU requires a C++ compiler, but {_get_cxx_compiler()} is not on "
            "this host; install it (Debian, Ubuntu: g++), set the environment variable CXX to a different compiler, "
            "or set recipe.compile=false"
        )


def configure_compiler(fingerprint: Mapping[str, Any]) -> None:
    """Configure torch.compile so that it never falls back to eager mode or reuses kernels of a different fingerprint.

    Each fingerprint has a separate cache folder for kernels, because torch's cache key contains neither the version of
    the C++ compiler nor the CPU model.
    """
    from torch._dynamo import config  # imported here because it takes a second
    from torch._functorch import config as autograd
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    # When torch reaches a limit, it warns and continues in eager mode, which has different bits.
    config.recompile_limit = config.accumulated_recompile_limit = _RECOMPILE_LIMIT
    config.fail_on_recompile_limit_hit = True
    config.suppress_errors = False
    # Compile the backward pass during the forward pass, when it is known which block a compile error comes from.
    autograd.force_non_lazy_backward_lowering = True
    cache_root = Path(cache_dir())
    cache_root = cache_root.parent if cache_root.name.startswith(_CACHE_PREFIX) else cache_root
    os.environ[_CACHE_VARIABLE] = str(cache_root / f"{_CACHE_PREFIX}{_compute_digest(fingerprint)}")


def make_compiler_fingerprint(on_gpu: bool) -> dict[str, str]:
    """Return the fingerprint entries of the compiler: its version, and a hash of its settings."""
    from torch._dynamo import config as tracing
    from torch._functorch import config as autograd
    from torch._inductor import config as kernels

    modules = {"kernels": kernels, "autograd": autograd, "tracing": tracing}
    with kernels.patch(COMPILE_OPTIONS):
        settings = {name: dict(_iterate_portable_settings(module)) for name, module in modules.items()}
    flags = {name: os.environ.get(name) for name in _TRITON_VARIABLES}
    return {
        "compile": f"by block, settings {_compute_digest([settings, flags])}",
        "compiler": f"triton {_find_triton_version()}" if on_gpu else _get_cxx_version(),
    }


def _iterate_portable_settings(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each setting in a torch config module, except for folders of this host.

    Settings that `configure_compiler` changes are skipped too, because they are the same in all runs.
    """
    for name, value in module.save_config_portable().items():
        if "_dir" not in name and "limit" not in name and name not in _CONFIGURED_SETTINGS:
            yield name, sorted(map(str, value)) if isinstance(value, set | frozenset) else value


def _check_triton() -> None:
    advice = "or set recipe.compile=false"
    if _find_triton_version() is None:
        raise UsageError(
            f"recipe.compile: torch.compile on CUDA requires Triton, which is not installed; install the version of "
            f"triton that torch {torch.__version__} requires, {advice}"
        )
    if not any(shutil.which(name) for name in (os.environ.get("CC", "gcc"), "clang", "cc")):
        raise UsageError(
            f"recipe.compile: Triton requires a C compiler to launch its kernels, but found none on this host; "
            f"install gcc, set the environment variable CC to a different compiler, {advice}"
        )
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        raise UsageError(
            f"recipe.compile: Triton requires a GPU with compute capability 7.0 or higher, but "
            f"{torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}; use a different GPU, {advice}"
        )


def _find_triton_version() -> str | None:
    versions = map(get_version, ("triton", "pytorch-triton", "pytorch-triton-rocm"))
    return next(filter(None, versions), None)


def _get_cxx_compiler() -> str:
    return os.environ.get("CXX", "g++")


def _get_cxx_version() -> str:
    result = subprocess.run([_get_cxx_compiler(), "--version"], capture_output=True, text=True, timeout=60, check=False)
    return result.stdout.partition("\n")[0] or _get_cxx_compiler()


def _compute_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:_HASH_DIGITS]
