"""Pairs of a case and a placement: some of them have each case and each placement once, and the others are slow."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

BEYOND = pytest.mark.slow("another pair has this case, and another one this placement")


def pairs(names: Sequence[str], placements: Sequence[Any]) -> list[Any]:
    """Return all pairs as parameters; those not marked go through both lists at once, the shorter one repeatedly."""
    first = {(index % len(names), index % len(placements)) for index in range(max(len(names), len(placements)))}
    return [
        pytest.param(name, placed, id=f"{name}-{_words(placed)}", marks=() if (row, column) in first else BEYOND)
        for row, name in enumerate(names)
        for column, placed in enumerate(placements)
    ]


def _words(placed: Any) -> str:
    return " ".join(re.findall(r"\w+", str(placed)))
