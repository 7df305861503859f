"""The values behind differing digests, and how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from lockstep.verification import trace
from lockstep.verification.compare import Difference
from lockstep.verification.trace import Wanted

_BUDGET_BYTES: Final = 512 << 20  # of tensors that are written whole


@dataclass(frozen=True)
class Values:
    """The pair of values that lies farthest apart.

    `apart` is their distance, infinite for NaN against a number; None for what has no distance, such as data, or a
    tensor that is not there.
    """

    index: tuple[int, ...] | None
    reference: str
    found: str
    apart: float | None
    scale: float = 1.0  # the largest magnitude in the reference


def wanted(differences: Sequence[Difference]) -> frozenset[Wanted]:
    """Return which tensors to look at: the first that differ, and as many of the others as is reasonable."""
    chosen: list[Wanted] = []
    room = _BUDGET_BYTES
    for each in differences:
        if each.wanted is not None:
            room -= trace.size_of(each.reference)
            if chosen and room < 0:
                break
            chosen.append(each.wanted)
    return frozenset(chosen)


def values(difference: Difference, reference: Path, found: Path) -> Values | None:
    """Return the values of a difference; None where the tensors were not written, or agree this time.

    `reference` and `found` are the folders of both cases.
    """
    if difference.wanted is None:
        return _figures(difference)
    expected = trace.kept(reference, 0, difference.wanted)
    other = trace.kept(found, difference.ranks[0], difference.wanted)
    return None if expected is None or other is None else farthest(expected, other)


def farthest(reference: Tensor, found: Tensor) -> Values | None:
    """Return the pair of elements that differ most; None where all are the same."""
    if reference.shape != found.shape or reference.dtype != found.dtype:
        return Values(None, _kind(reference), _kind(found), None)
    one, other = reference.double().flatten(), found.double().flatten()
    apart = (one - other).abs()
    apart = torch.where(one.isnan() & other.isnan() | (one == other), 0.0, apart.nan_to_num(math.inf, math.inf))
    if not apart.numel() or not bool(apart.max() > 0):
        return None
    at = int(apart.argmax())
    index = tuple(int(each) for each in torch.unravel_index(torch.tensor(at), reference.shape))
    scale = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return Values(index, _number(one[at]), _number(other[at]), float(apart[at]), scale)


def largest(found: Sequence[tuple[Difference, Values]]) -> float | None:
    """Return the largest distance as a part of the largest magnitude of its kind at its step; None for no pair."""
    scales: dict[tuple[int | None, str], float] = {}
    for difference, each in found:
        key = difference.position, difference.what
        scales[key] = max(scales.get(key, 0.0), each.scale)
    parts = (_part(each.apart, scales[key.position, key.what]) for key, each in found if each.apart is not None)
    return max(parts, default=None)


def _part(apart: float, scale: float) -> float:
    return apart / scale if scale else math.inf


def _figures(difference: Difference) -> Values:
    """Compare figures that the differences hold themselves, as hexadecimal text."""
    one, other = _float(difference.reference), _float(difference.found)
    if one is None or other is None:
        return Values(None, _shown(difference.reference), _shown(difference.found), None)
    apart = abs(one - other)
    return Values(None, repr(one), repr(other), math.inf if math.isnan(apart) else apart, abs(one))


def _float(text: str) -> float | None:
    number = text.removeprefix("-").startswith("0x") or text in ("nan", "inf", "-inf")
    return float.fromhex(text) if number else None


def _shown(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."  # what an engine keeps may be long


def _number(value: Tensor) -> str:
    return f"{value.item():.9g}"


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
