"""Environment variables that change the results of kernels. They are part of the fingerprint, and some are rejected."""

import os
from typing import Final

import torch

from lockstep.errors import UsageError

NO_FLAGS: Final = "none"  # no variable is set
_ALL_DEVICE_VARIABLES: Final = ("TIMM_FUSED_ATTN",)
_TF32_VARIABLES: Final = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
_CUDA_VARIABLES: Final = (
    *("CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "DISABLE_ADDMM_CUDA_LT", *_TF32_VARIABLES),
    *("TORCH_BLAS_PREFER_CUBLASLT", "TORCH_CUBLASLT_UNIFIED_WORKSPACE", "TORCH_CUDNN_USE_HEURISTIC_MODE_B"),
    *("TORCH_CUDNN_V8_API_DISABLED", "TORCH_LINALG_PREFER_CUSOLVER"),
)


def read_env_flags(device: torch.device) -> str:
    """Return the variables that are set and affect the results on `device`, as `NAME=value NAME=value`, or NO_FLAGS."""
    names = (*_ALL_DEVICE_VARIABLES, *_CUDA_VARIABLES) if device.type == "cuda" else _ALL_DEVICE_VARIABLES
    return " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ) or NO_FLAGS


def check_env_flags(precision: str) -> None:
    """Raise UsageError if an environment variable contradicts `precision` or makes torch select kernels by timing."""
    if os.environ.get("PYTORCH_TUNABLEOP_ENABLED", "0") != "0":
        raise UsageError(
            "PYTORCH_TUNABLEOP_ENABLED is set, which selects matrix product kernels by timing, so ranks may select "
            "different kernels; unset it"
        )
    for name in _TF32_VARIABLES:
        if precision == "fp32" and os.environ.get(name, "0") != "0":
            raise UsageError(
                f"recipe.precision: got fp32, but {name}={os.environ[name]} computes float32 products with only 10 of "
                f"the 23 mantissa bits; unset {name}"
            )
    if precision == "tf32" and os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        raise UsageError(
            "recipe.precision: got tf32, but NVIDIA_TF32_OVERRIDE=0 disables TF32; unset the variable, or use fp32"
        )
