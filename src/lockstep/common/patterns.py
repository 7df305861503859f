"""Shell patterns over names, such as those of a model's parameters: `layer1.*`, `*.bias`."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final

from lockstep.common.names import suggestion
from lockstep.errors import UsageError

_SHOWN: Final = 8  # names in a message


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name fits one of the patterns, by the rules of fnmatch: `*` also stands for dots."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def select(key: str, patterns: Sequence[str], names: Sequence[str], what: str = "parameter") -> set[str]:
    """Return those of `names` that fit a pattern. UsageError, which begins with `key`, where a pattern fits none."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = suggestion(pattern, names)
            raise UsageError(
                f"{key}: {pattern!r} matches no {what}{near}" + ("" if near else f"; there are {list_some(names)}")
            )
    return {name for name in names if matches(name, patterns)}


def list_some(names: Sequence[str], most: int = _SHOWN) -> str:
    """List names for a message, no more than fit one."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
