"""The settings that decide whether kernels are exact: what each is now, and what it is in a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from lockstep.device.precision import fix_kernels, fix_workspace
from lockstep.device.switches import check_switches
from lockstep.errors import UsageError

# Of the environment, and why each matters. Those of cuBLAS are read when CUDA starts.
_VARIABLES: Final[Mapping[str, str]] = {
    "CUBLAS_WORKSPACE_CONFIG": "cuBLAS is deterministic with :4096:8 or :16:8 alone",
    "NVIDIA_TF32_OVERRIDE": "1 makes libraries take TF32 whatever a program asks for; 0 and unset do not",
}


@dataclass(frozen=True)
class Setting:
    """A setting by name: what it is in this process as it was started, in a run of Lockstep, and what it does."""

    name: str
    now: str
    in_run: str
    meaning: str


def settings(threads: int) -> list[Setting]:
    """Return all settings; this process has those of a run afterwards."""
    before = _values()
    with suppress(UsageError):  # which `doubts` tells
        fix_workspace()
    fix_kernels(threads)
    after = _values()
    return [Setting(name, before[name], after[name], _VARIABLES.get(name, "")) for name in before]


def doubts(precision: str) -> list[str]:
    """Return which variables of the user's would keep a run of this precision from what it promises."""
    found = []
    checks: tuple[Callable[[], None], ...] = (fix_workspace, partial(check_switches, precision))
    for check in checks:
        try:
            check()
        except UsageError as error:
            found.append(str(error))
    return found


def _values() -> dict[str, str]:
    variables = {name: os.environ.get(name, "unset") for name in _VARIABLES}
    return variables | {name: str(value) for name, value in _torch().items()}


def _torch() -> dict[str, Any]:
    """Return torch's own settings, by the names that torch has for them."""
    cuda, cudnn, matmul = torch.backends.cuda, torch.backends.cudnn, torch.backends.cuda.matmul
    return {
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.backends.cudnn.deterministic": cudnn.deterministic,
        "torch.backends.cudnn.benchmark": cudnn.benchmark,
        "torch.backends.cudnn.conv.fp32_precision": cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "torch.backends.cudnn.rnn.fp32_precision": cudnn.rnn.fp32_precision,  # type: ignore[attr-defined]
        "torch.backends.cuda.matmul.fp32_precision": matmul.fp32_precision,
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
            matmul.allow_bf16_reduced_precision_reduction
        ),
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
            matmul.allow_fp16_reduced_precision_reduction
        ),
        "torch.backends.cuda.matmul.allow_fp16_accumulation": matmul.allow_fp16_accumulation,
        "scaled_dot_product_attention by math": cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
        "scaled_dot_product_attention by flash attention": cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        "scaled_dot_product_attention, memory-efficient": cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
        "scaled_dot_product_attention by cuDNN": cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
        "attention in 16 bits adds in 16 bits": cuda.fp16_bf16_reduction_math_sdp_allowed(),  # type: ignore[no-untyped-call]
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    }
