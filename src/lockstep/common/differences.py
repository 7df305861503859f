"""Describes values that must be equal on all ranks but differ."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lockstep.common.rank import ranks_in_words
from lockstep.common.text import printable_line

_MAX_VALUE_CHARS: Final = 60  # maximum number of characters of a value
_MAX_DIFFERENCES: Final = 5  # maximum number of differences


def differences(
    facts: Mapping[int, Mapping[str, Any]],
    hosts: Sequence[str],
    advice: str = "start all ranks with the same value",
    where: str = "",
) -> list[str]:
    """Return a message for each fact that differs from rank 0, with the differing ranks and the value on the first.

    `hosts` contains the host name of each rank, or is empty if host names don't matter. `where` is the source line of
    user code that the facts belong to, if any.
    """
    lines = []
    for name in dict.fromkeys(name for rank_facts in facts.values() for name in rank_facts):
        expected = facts[0].get(name)
        different_ranks = [rank for rank in facts if not _is_same(facts[rank].get(name), expected)]
        if different_ranks:
            details = "; ".join(_describe_differences(expected, facts[different_ranks[0]].get(name)))
            verb = "differs" if len(different_ranks) == 1 else "differ"
            ranks, first = ranks_in_words(different_ranks, hosts), ranks_in_words([0], hosts)
            location = f" ({where})" if where else ""
            lines.append(f"{name}: {ranks} {verb} from {first}: {details}{location}; {advice}")
    return lines


def _describe_differences(first: Any, other: Any, name: str = "") -> list[str]:
    """Return the differences between two values, key by key, in the form `name: OTHER, not FIRST`."""
    if not (isinstance(first, dict) and isinstance(other, dict)):
        return [f"{f'{name}: ' if name else ''}{_short(other)}, not {_short(first)}"]
    lines = []
    for key in sorted({*first, *other}):
        if not _is_same(first.get(key), other.get(key)):
            label = printable_line(str(key))
            lines += _describe_differences(first.get(key), other.get(key), f"{name}.{label}" if name else label)
    return (
        lines
        if len(lines) <= _MAX_DIFFERENCES
        else [*lines[:_MAX_DIFFERENCES], f"{len(lines) - _MAX_DIFFERENCES} more"]
    )


def _is_same(value: Any, other: Any) -> bool:
    return json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)  # in text form, NaN equals NaN


def _short(value: Any) -> str:
    text = printable_line(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[: _MAX_VALUE_CHARS - 3]}..."
