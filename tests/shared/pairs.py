"""Pairs of a case and a placement: the gate has each of both, and scripts/test --all every pair."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

BEYOND = pytest.mark.extended("the gate has this case elsewhere, and another case here")


def pairs(names: Sequence[str], placements: Sequence[Any]) -> list[Any]:
    """Return all pairs as parameters; those in the gate go through both lists at once, the shorter one repeatedly."""
    gate = {(turn % len(names), turn % len(placements)) for turn in range(max(len(names), len(placements)))}
    return [
        pytest.param(name, placed, id=f"{name}-{_words(placed)}", marks=() if (row, column) in gate else BEYOND)
        for row, name in enumerate(names)
        for column, placed in enumerate(placements)
    ]


def _words(placed: Any) -> str:
    return " ".join(re.findall(r"\w+", str(placed)))
