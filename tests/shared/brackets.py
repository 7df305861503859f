"""Sums as text, which shows where their brackets stand."""

from collections.abc import Iterable

from lockstep.core.tree import BinaryCounter, sum_pieces


def bracketed(left: str, right: str) -> str:
    return f"({left}+{right})"


def counted(leaves: Iterable[int]) -> BinaryCounter[str]:
    """Return what has added these leaves, in their order, as far as it can."""
    counter = BinaryCounter(bracketed)
    for leaf in leaves:
        counter.push(leaf, str(leaf))
    return counter


def alone(leaves: int) -> str:
    """Add all leaves in one process."""
    return sum_pieces(counted(range(leaves)).pop_pieces(), leaves, bracketed)
