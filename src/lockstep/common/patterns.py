"""Shell-style patterns for names, such as the parameter names of a model: `layer1.*`, `*.bias`."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final

from lockstep.common.names import format_suggestion
from lockstep.errors import UsageError

_MAX_NAMES: Final = 8  # default maximum number of names in a message


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches any of the patterns. As in fnmatch, `*` also matches dots."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def select_names(key: str, patterns: Sequence[str], names: Sequence[str], kind: str = "parameter") -> set[str]:
    """Return the names that match any pattern. If a pattern matches no name, raise UsageError, prefixed with `key`."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = format_suggestion(pattern, names)
            raise UsageError(
                f"{key}: {pattern!r} matches no {kind}{hint}" + ("" if hint else f"; names: {list_some(names)}")
            )
    return {name for name in names if matches_any(name, patterns)}


def list_some(names: Sequence[str], limit: int = _MAX_NAMES) -> str:
    """Format at most `limit` names for a message, such as `a, b and 3 more`."""
    suffix = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + suffix
