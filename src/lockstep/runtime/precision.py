"""Precision of the forward pass and the scale that keeps fp16 gradients from vanishing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

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

    An operation without a deterministic kernel raises RuntimeError that names it. cuBLAS reads its workspace setting
    when CUDA starts, so set CUBLAS_WORKSPACE_CONFIG=:4096:8 before (runtime/world.py does).
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # Filling fresh memory finds reads of uninitialised memory; it costs a pass over every tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
