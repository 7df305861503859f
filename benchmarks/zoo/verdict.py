"""Compare what the ranks of a contestant returned with the reference.

Integers must be equal. For other numbers, the tolerance is computed: `MARGIN` times the distance between two
references, one in the program's precision and one in float64, and at least `MARGIN` roundings of the largest number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.zoo.program import Numbers

MARGIN: Final = 8.0
SHOWN: Final = 6  # numbers of a tensor that a verdict shows


@dataclass(frozen=True)
class Ended:
    """How a rank ended: with numbers, or with an error and the line of the program it happened in."""

    numbers: Numbers | None = None
    error: str = ""
    line: str = ""


@dataclass(frozen=True)
class Verdict:
    """`status` is right, wrong, hangs, fails (a connection of ranks broke or timed out) or refused (any other error).

    `off` is the largest deviation, relative to the largest expected number.
    """

    status: str
    name: str = ""
    rank: int | None = None
    off: float = 0.0
    tolerance: float = 0.0
    same_bits: bool = False
    expected: Any = None
    got: Any = None
    error: str = ""
    line: str = ""


def judge(low: Numbers, high: Numbers, ranks: Sequence[Ended]) -> Verdict:
    """Return the verdict on ranks that ended: the first error, else the largest deviation."""
    for number, rank in enumerate(ranks):
        if rank.numbers is None:
            return failure(number, rank)
    verdicts = [
        compare(name, number, low[name], high[name], rank.numbers) for number, rank in enumerate(ranks) for name in low
    ]
    same_bits = all(verdict.same_bits for verdict in verdicts)
    worst = max(verdicts, key=lambda verdict: (verdict.status == "wrong", verdict.off))
    return worst if worst.status == "wrong" else Verdict("right", off=worst.off, same_bits=same_bits)


def failure(number: int, rank: Ended) -> Verdict:
    """Return the verdict on a rank that ended with an error."""
    broken = any(sign in rank.error for sign in ("gloo/transport", "Connection", "Timed out", "timed out"))
    return Verdict("fails" if broken else "refused", rank=number, error=rank.error, line=rank.line)


def compare(name: str, rank: int, low: Tensor, high: Tensor, numbers: Numbers) -> Verdict:
    """Compare one tensor of one rank."""
    if name not in numbers:
        return Verdict("wrong", name, rank, off=1.0, expected=low.flatten()[:SHOWN].tolist(), got=f"no {name}")
    got = numbers[name].detach()
    if got.shape != low.shape:
        shown = low.flatten()[:SHOWN].tolist(), got.flatten()[:SHOWN].tolist()
        return Verdict("wrong", name, rank, off=_count_off(low, got), expected=shown[0], got=shown[1])
    exact = not low.is_floating_point()
    largest = float(high.double().abs().max().clamp(min=1e-30))
    off = float((got.double() - high.double()).abs().nan_to_num(nan=torch.inf).max()) / largest
    rounding = max(float((low.double() - high.double()).abs().max()) / largest, torch.finfo(torch.float32).eps)
    tolerance = 0.0 if exact else MARGIN * rounding
    same_bits = bool(torch.equal(got.to(low.dtype), low))
    if off <= tolerance:
        return Verdict("right", name, rank, off, tolerance, same_bits)
    worst = (got.double() - high.double()).abs().flatten().topk(min(SHOWN, got.numel())).indices.sort().values
    shown = low.flatten()[worst].tolist(), got.flatten()[worst].tolist()
    return Verdict("wrong", name, rank, off, tolerance, expected=shown[0], got=shown[1])


def _count_off(expected: Tensor, got: Tensor) -> float:
    return abs(got.numel() - expected.numel()) / max(expected.numel(), 1)
