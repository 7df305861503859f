"""Slurm's compact notation: `n[1-2,5],gpu[001-004]x` for hosts and `2(x3),1` for the number of tasks per host."""

import re
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Final

MOST: Final = 65_536  # hosts or counts in one list, which is Slurm's own limit

_BRACKETS: Final = re.compile(r"\[([^\[\]]*)\]")
_RANGE: Final = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_COUNT: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def hosts(text: str) -> tuple[str, ...]:
    """Expand a host list, in order and with leading zeros. Raises ValueError if the list is invalid.

    If a name has several brackets, the last one varies fastest: `a[1-2]b[3-4]` is a1b3, a1b4, a2b3, a2b4.
    """
    found: list[str] = []
    for part in _parts(text):
        pieces = _BRACKETS.split(part)  # text, inside of brackets, text, ...
        if not part or any(mark in piece for piece in pieces[::2] for mark in "[]"):
            raise ValueError("expected host names such as n[1-2,5],login")
        choices = [_numbers(piece) if number % 2 else [piece] for number, piece in enumerate(pieces)]
        _check_length(len(found) + prod(map(len, choices)))
        found += ("".join(chosen) for chosen in product(*choices))
    return tuple(found)


def counts(text: str) -> tuple[int, ...]:
    """Expand the number of tasks per host: `2(x3),1` is 2, 2, 2, 1. Raises ValueError if the list is invalid."""
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError("expected counts such as 2(x3),1")
        times = int(match[2] or 1)
        _check_length(len(found) + times)
        found += [int(match[1])] * times
    return tuple(found)


def _parts(text: str) -> Iterator[str]:
    """Split at commas outside of brackets."""
    begin = depth = 0
    for place, mark in enumerate(text):
        depth += (mark == "[") - (mark == "]")
        if mark == "," and depth == 0:
            yield text[begin:place]
            begin = place + 1
    yield text[begin:]


def _numbers(inside: str) -> list[str]:
    """Expand `1-2,5`. Numbers of a range are padded to the width of its first number."""
    found: list[str] = []
    for each in inside.split(","):
        match = _RANGE.fullmatch(each)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first:
            raise ValueError(f"expected numbers such as 1-2,5 in the brackets, got {inside}")
        _check_length(len(found) + last - first + 1)
        found += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return found


def _check_length(length: int) -> None:
    if length > MOST:
        raise ValueError(f"more than {MOST} entries")
