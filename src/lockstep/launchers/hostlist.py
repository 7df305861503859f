"""Expands Slurm's compact lists: `n[1-2,5],gpu[001-004]x` for hosts, and `2(x3),1` for the number of tasks per host."""

import re
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Final

MAX_ENTRIES: Final = 65_536  # maximum number of entries in a list, as in Slurm

_BRACKETS: Final = re.compile(r"\[([^\[\]]*)\]")
_RANGE: Final = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_COUNT: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand a host list, keeping the order and leading zeros. Raises ValueError if the list is invalid.

    If a name has multiple brackets, the last bracket varies fastest: `a[1-2]b[3-4]` is a1b3, a1b4, a2b3, a2b4.
    """
    names: list[str] = []
    for part in _split_at_commas(text):
        pieces = _BRACKETS.split(part)  # alternates between text and the content of brackets
        if not part or any(mark in piece for piece in pieces[::2] for mark in "[]"):
            raise ValueError("expected host names such as n[1-2,5],login")
        choices = [_expand_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        _check_length(len(names) + prod(map(len, choices)))
        names += ("".join(combination) for combination in product(*choices))
    return tuple(names)


def expand_counts(text: str) -> tuple[int, ...]:
    """Expand a list of task counts per host: `2(x3),1` is 2, 2, 2, 1. Raises ValueError if the list is invalid."""
    numbers: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError("expected task counts such as 2(x3),1")
        times = int(match[2] or 1)
        _check_length(len(numbers) + times)
        numbers += [int(match[1])] * times
    return tuple(numbers)


def _split_at_commas(text: str) -> Iterator[str]:
    """Split text at commas that aren't in brackets."""
    begin = depth = 0
    for index, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            yield text[begin:index]
            begin = index + 1
    yield text[begin:]


def _expand_numbers(text: str) -> list[str]:
    """Expand number ranges such as `1-2,5`. Numbers are padded to the width of the first number in their range."""
    numbers: list[str] = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first:
            raise ValueError(f"expected numbers such as 1-2,5 in the brackets, got {text}")
        _check_length(len(numbers) + last - first + 1)
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers


def _check_length(length: int) -> None:
    if length > MAX_ENTRIES:
        raise ValueError(f"more than {MAX_ENTRIES} entries")
