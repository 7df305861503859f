"""The norm of a gradient, in an order that sharding does not change.

Each row of dim 0 gets its own norm; the rows of all parameters, in the model's order, then make one vector, whose
norm is taken in float64. A row is never cut, so wherever rows are held, the same numbers are added in
the same order.

CUDA's own kernel adds a row up in an order that depends on how many rows there are, and on where the first begins in
memory. There the right half of each row is added to the left one, element by element, until one is left: an order by
columns alone. Rows of one width are folded together, so that all of a model takes few kernels.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

_FOLDED: Final = 64 << 20  # elements that are copied at a time, unless a single tensor has more


def row_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return for each tensor, [R, ...], the L2 norm of each row: float64 of shape [R]; a 0-dim tensor is one row.

    They are added up in float32 at least, since 16 bits would lose most of a sum. All tensors are on one device.
    """
    # Widths spelled out, because a rank may hold no row at all, and -1 is ambiguous then.
    every = [
        each.reshape(len(each), math.prod(each.shape[1:])) if each.ndim else each.reshape(1, 1) for each in tensors
    ]
    if tensors and _is_folded(tensors[0]):
        return folded_norms(every)
    return [torch.linalg.vector_norm(rows, dim=1, dtype=_wide(rows)).double() for rows in every]


def folded_norms(every: Sequence[Tensor]) -> list[Tensor]:
    """Return the norms of the rows of each [R, n], added up by halves: float64 of shape [R]."""
    norms: dict[int, Tensor] = {}
    for group in _groups(every):
        squares = torch.cat([every[number].to(_wide(every[number])) for number in group]).square_()
        width = squares.shape[1]
        while width > 1:
            half = -(-width // 2)
            squares[:, : width - half].add_(squares[:, half:width])
            width = half
        found = squares[:, :1].sum(1).sqrt_().double()  # of one number, or none
        norms |= zip(group, torch.split(found, [len(every[number]) for number in group]), strict=True)
    return [norms[number] for number in range(len(every))]


def norm_of_rows(norms: Tensor) -> Tensor:
    """Return the norm of all rows together, given the norm of each: float64, 0-dim."""
    # In memory of its own, since CUDA adds in another order where a vector begins elsewhere in some.
    norm: Tensor = torch.linalg.vector_norm(norms.clone() if norms.is_cuda else norms)
    return norm


def clip_(tensors: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the tensors in place so that their total norm is at most `max_norm`; smaller ones stay as they are."""
    factor = (max_norm / norm).clamp(max=1.0).float()
    torch._foreach_mul_(list(tensors), factor.to(tensors[0].device) if tensors else factor)


def _is_folded(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _groups(every: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the numbers of tensors whose rows have one width and are added up in one dtype, about so many at a time."""
    groups: dict[tuple[int, torch.dtype], list[int]] = {}
    elements: Counter[tuple[int, torch.dtype]] = Counter()
    for number, rows in enumerate(every):
        key = rows.shape[1], _wide(rows)
        if elements[key] and elements[key] + rows.numel() > _FOLDED:
            yield groups.pop(key)
            elements[key] = 0
        groups.setdefault(key, []).append(number)
        elements[key] += rows.numel()
    yield from groups.values()
