"""torch.compile, so that what is computed for a shape does not depend on the shapes seen before it.

By itself torch.compile makes kernels for any size once it has seen a second one. A run that resumes sees the shapes of
micro-batches in another order, and a rank others than its neighbour, so they would compute with other kernels.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from lockstep.errors import UsageError

# Of kernels for one piece of code, blocks of one class together. A recipe has about six shapes, in two modes.
_LIMIT: Final = 4096

# Nothing that is chosen by the time it takes: two ranks, or two runs, would choose differently.
_OPTIONS: Final = {
    "deterministic": True,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
}


def compiled(model: nn.Module) -> Callable[..., Any]:
    """Return the compiled forward of a model: each shape has kernels of its own."""
    from torch._dynamo import config  # here, because it takes a second

    # Beyond its limits torch goes on uncompiled, with other bits and a warning.
    config.recompile_limit = config.accumulated_recompile_limit = _LIMIT
    config.fail_on_recompile_limit_hit = True
    config.suppress_errors = False
    return torch.compile(model, dynamic=False, options=dict(_OPTIONS))


def check_compiler() -> None:
    """Raise UsageError where there is no C++ compiler, with which torch builds the kernels for a CPU."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise UsageError(
            f"recipe.compile: torch compiles for the CPU with a C++ compiler, and there is no {name} on this host; "
            f"install it (Debian, Ubuntu: g++), name another in the environment variable CXX, or set it to false"
        )
