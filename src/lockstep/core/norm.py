"""The norm of a gradient, in an order that sharding does not change.

Each row of dim 0 gets its own norm; the rows of all parameters, in the model's order, then make one vector, whose
norm is taken in float64. A row is never cut, so wherever rows are held, the same numbers are added in
the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def row_norms(tensor: Tensor) -> Tensor:
    """Return the L2 norm of each row of dim 0: float64 of shape [rows]; a 0-dim tensor is one row.

    They are added up in float32 at least, since 16 bits would lose most of a sum.
    """
    # Widths spelled out, because a rank may hold no row at all, and -1 is ambiguous then.
    rows = tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:])) if tensor.ndim else tensor.reshape(1, 1)
    wide = torch.promote_types(tensor.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=wide)
    return norms.double()


def norm_of_rows(norms: Tensor) -> Tensor:
    """Return the norm of all rows together, given the norm of each: float64, 0-dim."""
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm


def clip_(tensors: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the tensors in place so that their total norm is at most `max_norm`; smaller ones stay as they are."""
    factor = (max_norm / norm).clamp(max=1.0).float()
    torch._foreach_mul_(list(tensors), factor)
