"""Precision of the forward pass and the scale that keeps fp16 gradients from vanishing."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from lockstep.errors import PreflightError

Precision = Literal["fp32", "bf16", "fp16"]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which the forward pass runs in `precision`; it may be entered again and again."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if precision == "bf16" else torch.float16)


def loss_scaler(
    precision: Precision, device: torch.device, initial: float, growth_interval: int
) -> torch.amp.GradScaler:
    """Return the dynamic loss scaler; for fp32 and bf16 it is disabled and does nothing."""
    scaler = torch.amp.GradScaler(
        device.type, init_scale=initial, growth_interval=growth_interval, enabled=precision == "fp16"
    )
    # It makes its tensors when it first scales; a rank without work in its first step would have none to update.
    scaler.scale(torch.zeros((), device=device))
    return scaler


def fix_kernels(threads: int) -> None:
    """Choose kernels that give the same bits each time: `threads` for each process, deterministic, no autotuning.

    An operation without a deterministic kernel raises RuntimeError that names it. On CUDA see `fix_workspace` too.
    """
    check_threads(threads)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # Filling fresh memory finds reads of uninitialised memory; it costs a pass over every tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    _keep_float32()
    # torch's attention layers fuse their forward in evaluation, but not in modules that have hooks, as those of
    # fully_shard have: the same weights would be evaluated in two ways.
    torch.backends.mha.set_fastpath_enabled(False)


def fix_workspace() -> None:
    """Make cuBLAS deterministic, unless the user chose a workspace. Call it before CUDA starts, which reads this."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


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
