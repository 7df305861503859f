"""The gradient norm, computed in an order of addition that doesn't depend on sharding.

First, the norm of each row of dim 0 is computed. Then the row norms of all parameters, in the order of the model, form
one vector, and its norm is computed in float64. A row is never split, so the same numbers are added in the same order
regardless of which ranks hold the rows.

On CUDA, the order in which the norm kernel adds a row depends on the number of rows and on the memory address of the
first row. Therefore the right half of each row is added to the left half, element by element, until one element is
left. This order depends only on the number of columns. Rows of the same width are folded together, so that the norm of
a full model takes few kernels.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

_MAX_FOLDED_ELEMENTS: Final = 64 << 20  # elements per copy, unless a single tensor has more


def row_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each row of each tensor [R, ...]: float64 of shape [R]. A 0-dim tensor is one row.

    Rows are accumulated in float32 or wider, because a 16-bit sum would lose most terms. All tensors must be on one
    device.
    """
    # Compute the widths explicitly: a rank may hold no rows, and reshape(0, -1) is ambiguous.
    matrices = [
        tensor.reshape(len(tensor), math.prod(tensor.shape[1:])) if tensor.ndim else tensor.reshape(1, 1)
        for tensor in tensors
    ]
    if tensors and _is_folded(tensors[0]):
        return folded_norms(matrices)
    return [torch.linalg.vector_norm(rows, dim=1, dtype=_accumulation_dtype(rows)).double() for rows in matrices]


def folded_norms(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return the row norms of each tensor [R, n], added by repeated halving: float64 of shape [R]."""
    norms: dict[int, Tensor] = {}
    for group in _group_by_width(matrices):
        squares = torch.cat([matrices[index].to(_accumulation_dtype(matrices[index])) for index in group]).square_()
        width = squares.shape[1]
        while width > 1:
            half = -(-width // 2)
            squares[:, : width - half].add_(squares[:, half:width])
            width = half
        row_norm_values = squares[:, :1].sum(1).sqrt_().double()  # one column is left, or no column if n is 0
        norms |= zip(group, torch.split(row_norm_values, [len(matrices[index]) for index in group]), strict=True)
    return [norms[index] for index in range(len(matrices))]


def norm_of_rows(norms: Tensor) -> Tensor:
    """Return the total norm from the norms of all rows: float64, 0-dim."""
    # Clone, because the order in which CUDA adds a vector depends on its offset in memory.
    norm: Tensor = torch.linalg.vector_norm(norms.clone() if norms.is_cuda else norms)
    return norm


def clip_(tensors: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the tensors in place so that their total norm is at most `max_norm`. `norm` is their current total norm.

    If `norm` is at most `max_norm`, the tensors don't change.
    """
    factor = (max_norm / norm).clamp(max=1.0).float()
    torch._foreach_mul_(list(tensors), factor.to(tensors[0].device) if tensors else factor)


def _is_folded(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _group_by_width(matrices: Sequence[Tensor]) -> Iterator[list[int]]:
    """Group tensors of the same row width and accumulation dtype. Yields the indices of the tensors in each group.

    A group has at most _MAX_FOLDED_ELEMENTS elements. A larger tensor forms its own group.
    """
    groups: dict[tuple[int, torch.dtype], list[int]] = {}
    elements: Counter[tuple[int, torch.dtype]] = Counter()
    for index, rows in enumerate(matrices):
        key = rows.shape[1], _accumulation_dtype(rows)
        if elements[key] and elements[key] + rows.numel() > _MAX_FOLDED_ELEMENTS:
            yield groups.pop(key)
            elements[key] = 0
        groups.setdefault(key, []).append(index)
        elements[key] += rows.numel()
    yield from groups.values()
