"""Precision of the forward pass and the scale that keeps fp16 gradients from vanishing."""

import os
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch.optim import Optimizer

from lockstep.core.engine_recipe import LossScale
from lockstep.core.precision import SCALED, Precision
from lockstep.errors import PreflightError, UsageError

_AUTOCAST: Final[Mapping[Precision, torch.dtype]] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_COMPUTING: Final[Mapping[Precision, torch.dtype]] = {
    "bf16-compute": torch.bfloat16,
    "fp16-compute": torch.float16,
    "fp16-true": torch.float16,
}
_TF32_CAPABILITY: Final = (8, 0)

_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
_EXACT_WORKSPACES: Final = (":4096:8", ":16:8")  # with which products do not depend on other streams


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which the forward pass runs in `precision`; it may be entered again and again."""
    dtype = _AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def computing_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype that all of a model computes in, None where it is that of its weights or autocast's choice."""
    return _COMPUTING.get(precision)


def stored_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype that weights are trained in, None where they stay in that which the model has."""
    return torch.float16 if precision == "fp16-true" else None


def loss_scaler(precision: Precision, loss_scale: LossScale, device: torch.device) -> torch.amp.GradScaler:
    """Return the loss scaler, of a dynamic scale or for one that is `static`; for all but fp16 it does nothing."""
    scaler = torch.amp.GradScaler(
        device.type,
        init_scale=loss_scale.initial if loss_scale.static is None else loss_scale.static,
        growth_interval=loss_scale.growth_interval,
        enabled=precision in SCALED,
    )
    # It makes its tensors when it first scales; a rank without work in its first step would have none to update.
    scaler.scale(torch.zeros((), device=device))
    return scaler


def unscale_(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """Divide an optimizer's gradients by the loss scale, and let the scaler note which are not finite.

    It is what the scaler's own `unscale_` does, which refuses gradients in fp16: those of weights in fp16.
    """
    assert scaler._scale is not None
    inverse = scaler._scale.double().reciprocal().float()
    found = scaler._unscale_grads_(optimizer, inverse, torch.zeros_like(inverse), True)
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found


def fix_kernels(threads: int, precision: Precision = "fp32", device: torch.device | None = None) -> None:
    """Choose kernels that give the same bits each time: `threads` for each process, deterministic, no autotuning.

    An operation without a deterministic kernel raises RuntimeError that names it. UsageError where `device` cannot
    compute in `precision`. On CUDA see `fix_workspace` too.
    """
    check_precision(precision, device or torch.device("cpu"))
    check_threads(threads)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # Filling fresh memory finds reads of uninitialised memory; it costs a pass over every tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    _keep_float32()
    if precision == "tf32":
        _take_tf32()
    _choose_attention()
    # torch's attention layers fuse their forward in evaluation, but not in modules that have hooks, as those of
    # fully_shard have: the same weights would be evaluated in two ways.
    torch.backends.mha.set_fastpath_enabled(False)


def fix_workspace() -> None:
    """Make cuBLAS deterministic; call it before CUDA starts, which reads this.

    A value of the user's own is kept where it is as exact, and else is a UsageError.
    """
    chosen = os.environ.setdefault(_WORKSPACE, _EXACT_WORKSPACES[0])
    if chosen not in _EXACT_WORKSPACES:
        raise UsageError(
            f"{_WORKSPACE}={chosen}: cuBLAS may then compute a product in another order each time; "
            f"unset it, or use {' or '.join(_EXACT_WORKSPACES)}"
        )


def attention() -> str:
    """Return the kernels that scaled_dot_product_attention may choose from on CUDA, by shape and dtype."""
    enabled = {
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
        "flash": torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        "memory-efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
        "math": torch.backends.cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
    }
    return ", ".join(name for name, on in enabled.items() if on)


def _choose_attention() -> None:
    """Leave out cuDNN's attention, whose backward adds in any order.

    That of flash and of memory-efficient attention adds in one order under use_deterministic_algorithms, and the third
    is made of products and a softmax. torch takes the first of the three that has a kernel for shape and dtype.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_math_sdp(True)


def _keep_float32() -> None:
    """Compute in no less precision than tensors have: cuDNN's convolutions would take TF32, cuBLAS add in 16 bits."""
    # The first line reaches every operation whose own setting nobody has touched; the others reach the rest. torch's
    # older settings (allow_tf32) are set too, since it raises where they contradict the newer ones.
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


def _take_tf32() -> None:
    """Let products of fp32 on CUDA round what they multiply to TF32: all of matrices, convolutions and RNNs alike."""
    # The older settings first, as above. They reach the CPU's matrix products too, which no device here computes so.
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = "tf32"  # type: ignore[attr-defined]
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"  # type: ignore[attr-defined]


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raise UsageError where `device` has no products in `precision`, and others would silently stand in for them."""
    if precision != "tf32":
        return
    if device.type != "cuda":
        raise UsageError(
            f"recipe.precision: tf32 is a way of CUDA's tensor cores to multiply, and this run computes on the "
            f"{device.type.upper()}; use fp32, bf16, or a GPU of compute capability 8.0 or above"
        )
    found = torch.cuda.get_device_capability(device)
    if found < _TF32_CAPABILITY:
        raise UsageError(
            f"recipe.precision: tf32 needs a GPU of compute capability 8.0 or above, and "
            f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}; use fp32 or fp16"
        )


def check_threads(threads: int) -> None:
    """Raise PreflightError where this process may not start so many threads: OpenMP would end it without a word."""
    if threads <= (os.cpu_count() or 1):
        return
    over = threading.Event()
    started = []
    try:
        for _ in range(threads):
            thread = threading.Thread(target=over.wait)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise PreflightError(
            f"recipe.threads: {threads} asked for, and this process could start {len(started)}; "
            f"choose fewer, or raise the limit (ulimit -u)"
        ) from error
    finally:
        over.set()
        for thread in started:
            thread.join()
