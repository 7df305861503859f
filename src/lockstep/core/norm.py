"""The gradient norm, computed in an order of addition that doesn't depend on sharding.

First, the norm of each row along dim 0 is computed. Then the row norms of all parameters are concatenated in the order
of the model, and the norm of this vector is computed in float64. Rows are never split between ranks, so the same
numbers are added in the same order for any sharding.

On CUDA, the order in which the norm kernel adds the elements of a row depends on the number of rows and on the memory
address of the first row. Therefore rows are folded instead: the right half is added to the left half, element by
element, until one element is left. This order depends only on the number of columns. Rows of the same width are folded
together, so that the norm of a full model takes few kernels.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

_MAX_FOLDED_ELEMENTS: Final = 64 << 20  # maximum number of elements to fold at once; a larger tensor is folded alone


def compute_row_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the L2 norms of the rows of each tensor [R, ...]: float64 of shape [R]. A 0-dim tensor is one row.

    Sums are accumulated in float32 or wider, because a 16-bit sum would lose most terms. All tensors must be on the
    same device.
    """
    # Compute the widths explicitly, because a rank may hold no rows, and reshape(0, -1) is ambiguous.
    matrices = [
        tensor.reshape(len(tensor), math.prod(tensor.shape[1:])) if tensor.ndim else tensor.reshape(1, 1)
        for tensor in tensors
    ]
    if tensors and _is_folded(tensors[0]):
        return compute_folded_norms(matrices)
    return [torch.linalg.vector_norm(rows, dim=1, dtype=_get_accumulation_dtype(rows)).double() for rows in matrices]


def compute_folded_norms(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return the row norms of each tensor [R, n], computed by repeated folding: float64 of shape [R]."""
    norms: dict[int, Tensor] = {}
    for group in _group_by_width(matrices):
        squares = torch.cat([matrices[index].to(_get_accumulation_dtype(matrices[index])) for index in group]).square_()
        width = squares.shape[1]
        while width > 1:
            half = -(-width // 2)
            squares[:, : width - half].add_(squares[:, half:width])
            width = half
        row_norms = squares[:, :1].sum(1).sqrt_().double()  # one column is left, or no column if n is 0
        norms |= zip(group, torch.split(row_norms, [len(matrices[index]) for index in group]), strict=True)
    return [norms[index] for index in range(len(matrices))]


def compute_total_norm(norms: Tensor) -> Tensor:
    """Return the total norm, given the norms of all rows: float64, 0-dim."""
    # Clone, because the order in which CUDA adds the elements of a vector depends on its offset in memory.
    norm: Tensor = torch.linalg.vector_norm(norms.clone() if norms.is_cuda else norms)
    return norm


def clip_(tensors: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the tensors in place so that their total norm is at most `max_norm`. `norm` is their current total norm.

    No-op if `norm` is at most `max_norm`.
    """
    factor = (max_norm / norm).clamp(max=1.0).float()
    torch._foreach_mul_(list(tensors), factor.to(tensors[0].device) if tensors else factor)


def _is_folded(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _get_accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _group_by_width(matrices: Sequence[Tensor]) -> Iterator[list[int]]:
    """Group tensors by row width and accumulation dtype. Yields the indices of the tensors in each group.

    A group has at most _MAX_FOLDED_ELEMENTS elements. Larger tensors form their own groups.
    """
    groups: dict[tuple[int, torch.dtype], list[int]] = {}
    elements: Counter[tuple[int, torch.dtype]] = Counter()
    for index, rows in enumerate(matrices):
        key = rows.shape[1], _get_accumulation_dtype(rows)
        if elements[key] and elements[key] + rows.numel() > _MAX_FOLDED_ELEMENTS:
            yield groups.pop(key)
            elements[key] = 0
        groups.setdefault(key, []).append(index)
        elements[key] += rows.numel()
    yield from groups.values()
