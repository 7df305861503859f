"""Messages about values that must be equal on all ranks but differ."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lockstep.common.rank import format_ranks_with_hosts
from lockstep.common.text import printable_line

_MAX_VALUE_CHARS: Final = 60  # maximum length of a value in a message
_MAX_DIFFERENCES: Final = 5  # maximum number of differences to report


def describe_differences(
    values_by_rank: Mapping[int, Mapping[str, Any]],
    hosts: Sequence[str],
    advice: str = "start all ranks with the same value",
    source_line: str = "",
) -> list[str]:
    """Return a message for each value that differs from rank 0's, with the differing ranks and one of their values.

    `values_by_rank` maps each rank to its named values. `hosts` contains the host name of each rank, or is empty if
    host names don't matter. `source_line` is the source line of user code that the values belong to, if any.
    """
    lines = []
    for name in dict.fromkeys(name for values in values_by_rank.values() for name in values):
        expected = values_by_rank[0].get(name)
        different_ranks = [
            rank for rank in values_by_rank if not _are_equal_as_json(values_by_rank[rank].get(name), expected)
        ]
        if different_ranks:
            details = "; ".join(_compare_values(expected, values_by_rank[different_ranks[0]].get(name)))
            verb = "differs" if len(different_ranks) == 1 else "differ"
            ranks, reference = format_ranks_with_hosts(different_ranks, hosts), format_ranks_with_hosts([0], hosts)
            location = f" ({source_line})" if source_line else ""
            lines.append(f"{name}: {ranks} {verb} from {reference}: {details}{location}; {advice}")
    return lines


def _compare_values(first: Any, other: Any, name: str = "") -> list[str]:
    """Return the differences between two values, such as `name: OTHER, not FIRST`. Dicts are compared key by key."""
    if not (isinstance(first, dict) and isinstance(other, dict)):
        return [f"{f'{name}: ' if name else ''}{_abbreviate(other)}, not {_abbreviate(first)}"]
    lines = []
    for key in sorted({*first, *other}):
        if not _are_equal_as_json(first.get(key), other.get(key)):
            label = printable_line(str(key))
            lines += _compare_values(first.get(key), other.get(key), f"{name}.{label}" if name else label)
    return (
        lines
        if len(lines) <= _MAX_DIFFERENCES
        else [*lines[:_MAX_DIFFERENCES], f"{len(lines) - _MAX_DIFFERENCES} more"]
    )


def _are_equal_as_json(left: Any, right: Any) -> bool:
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)  # as JSON, NaN equals NaN


def _abbreviate(value: Any) -> str:
    text = printable_line(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[: _MAX_VALUE_CHARS - 3]}..."
