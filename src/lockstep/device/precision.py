"""The numerical settings of a process: autocast and dtypes, loss scaling for fp16, and deterministic kernels."""

import os
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch.optim import Optimizer

from lockstep.core.engine_recipe import LossScale
from lockstep.core.precision import SCALED_PRECISIONS, Precision
from lockstep.errors import PreflightError, UsageError

_AUTOCAST_DTYPES: Final[Mapping[Precision, torch.dtype]] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_COMPUTE_DTYPES: Final[Mapping[Precision, torch.dtype]] = {
    "bf16-compute": torch.bfloat16,
    "fp16-compute": torch.float16,
    "fp16-true": torch.float16,
}
_TF32_CAPABILITY: Final = (8, 0)

_WORKSPACE_VARIABLE: Final = "CUBLAS_WORKSPACE_CONFIG"
# With these values, the result of a matrix product doesn't depend on concurrent work on other streams.
_DETERMINISTIC_WORKSPACES: Final = (":4096:8", ":16:8")


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Return a reusable context manager for the forward pass in `precision`."""
    dtype = _AUTOCAST_DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def get_compute_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype that the whole model computes in, or None if the weights or autocast determine the dtype."""
    return _COMPUTE_DTYPES.get(precision)


def get_weight_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype in which weights are stored, or None if they keep the dtype of the model."""
    return torch.float16 if precision == "fp16-true" else None


def make_loss_scaler(precision: Precision, loss_scale: LossScale, device: torch.device) -> torch.amp.GradScaler:
    """Return a GradScaler with a dynamic or a static scale. It is only enabled for fp16 precisions."""
    scaler = torch.amp.GradScaler(
        device.type,
        init_scale=loss_scale.initial if loss_scale.static is None else loss_scale.static,
        growth_interval=loss_scale.growth_interval,
        enabled=precision in SCALED_PRECISIONS,
    )
    # Create the scaler's tensors. Otherwise, its first call would create them, but a rank without micro-batches makes
    # no such call.
    scaler.scale(torch.zeros((), device=device))
    return scaler


def unscale_(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """Divide the gradients of an optimizer by the loss scale, and record in the scaler whether they are finite.

    `GradScaler.unscale_` does the same but raises an error for fp16 gradients, and therefore for fp16 weights.
    """
    assert scaler._scale is not None
    inverse = scaler._scale.double().reciprocal().float()
    found_inf = scaler._unscale_grads_(optimizer, inverse, torch.zeros_like(inverse), True)
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found_inf


def select_deterministic_kernels(
    num_threads: int, precision: Precision = "fp32", device: torch.device | None = None
) -> None:
    """Select deterministic kernels, disable autotuning, and set the number of threads of this process.

    After this call, torch raises a RuntimeError for operations that have no deterministic kernel. Raises UsageError if
    `device` doesn't support `precision`. On CUDA, call `set_cublas_workspace` as well.
    """
    check_precision(precision, device or torch.device("cpu"))
    check_threads(num_threads)
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # Filling uninitialized memory is a debugging feature of torch, and costs one pass over every tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    _disable_reduced_precision()
    if precision == "tf32":
        _enable_tf32()
    _set_attention_backends()
    # In evaluation, torch's attention layers use a fast path with fused kernels, except for modules with hooks, such as
    # those of fully_shard. The evaluation result would then depend on the strategy.
    torch.backends.mha.set_fastpath_enabled(False)


def set_cublas_workspace() -> None:
    """Set CUBLAS_WORKSPACE_CONFIG so that cuBLAS is deterministic. Call this function before CUDA is initialized.

    Keeps a value that is already set if it is deterministic. Otherwise, raises UsageError.
    """
    setting = os.environ.setdefault(_WORKSPACE_VARIABLE, _DETERMINISTIC_WORKSPACES[0])
    if setting not in _DETERMINISTIC_WORKSPACES:
        raise UsageError(
            f"{_WORKSPACE_VARIABLE}={setting}: cuBLAS may compute a product in a different order each time; "
            f"unset it, or use {' or '.join(_DETERMINISTIC_WORKSPACES)}"
        )


def list_attention_backends() -> str:
    """Return the backends that are enabled for scaled_dot_product_attention on CUDA, separated by commas."""
    enabled = {
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
        "flash": torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        "memory-efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
        "math": torch.backends.cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
    }
    return ", ".join(name for name, is_enabled in enabled.items() if is_enabled)


def _set_attention_backends() -> None:
    """Enable all attention backends except cuDNN, whose backward pass doesn't add in a fixed order.

    With use_deterministic_algorithms, the backward passes of flash attention and memory-efficient attention add in a
    fixed order. The math backend consists of matrix products and a softmax. torch uses the first of these three
    backends that supports the shape and dtype.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_math_sdp(True)


def _disable_reduced_precision() -> None:
    """Disable computation in less than the precision of the tensors, such as TF32 in cuDNN or 16-bit sums in cuBLAS."""
    # The first setting is the default, and the next two override it for operations that have their own setting. The
    # legacy settings (allow_tf32) are set too, because torch raises an error if they contradict the newer settings.
    torch.backends.fp32_precision = "ieee"  # type: ignore[attr-defined]
    torch.backends.mkldnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    torch.backends.mkldnn.rnn.fp32_precision = "ieee"  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_accumulation = False
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)


def _enable_tf32() -> None:
    """Use TF32 for all fp32 matrix products, convolutions and RNNs on CUDA."""
    # Legacy settings first, as above. They also affect matrix products on the CPU, which must stay in fp32.
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = "tf32"  # type: ignore[attr-defined]
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"  # type: ignore[attr-defined]


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raise UsageError if `device` doesn't support `precision`, because torch would silently use fp32 instead."""
    if precision != "tf32":
        return
    if device.type != "cuda":
        raise UsageError(
            f"recipe.precision: tf32 requires a CUDA device, but this run uses the {device.type.upper()}; use fp32, "
            f"bf16, or a GPU with compute capability 8.0 or higher"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _TF32_CAPABILITY:
        raise UsageError(
            f"recipe.precision: tf32 requires a GPU with compute capability 8.0 or higher, but "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}; use fp32 or fp16"
        )


def check_threads(num_threads: int) -> None:
    """Raise PreflightError if this process can't start `num_threads` threads. OpenMP would exit without a message."""
    if num_threads <= (os.cpu_count() or 1):
        return
    finished = threading.Event()
    threads_started = []
    try:
        for _ in range(num_threads):
            thread = threading.Thread(target=finished.wait)
            thread.start()
            threads_started.append(thread)
    except RuntimeError as error:
        raise PreflightError(
            f"recipe.threads: got {num_threads}, but this process could only start {len(threads_started)}; "
            f"use fewer, or raise the limit (ulimit -u)"
        ) from error
    finally:
        finished.set()
        for thread in threads_started:
            thread.join()
