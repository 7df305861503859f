"""Suggestions for mistyped names in error messages."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

_MAX_LISTED: Final = 8  # maximum number of names that are listed in addition to a suggestion
_MAX_COMPARED_CHARS: Final = 100  # maximum length of a name to compare; longer names take too long


def find_nearest(name: str, names: Iterable[str], max_count: int = 3) -> list[str]:
    """Return up to `max_count` items of `names` that are similar to `name`, with the most similar first."""
    if len(name) > _MAX_COMPARED_CHARS:
        return []
    names_by_lowercase = {candidate.lower(): candidate for candidate in names}
    return [
        names_by_lowercase[match] for match in difflib.get_close_matches(name.lower(), names_by_lowercase, n=max_count)
    ]


def format_suggestion(name: str, names: Iterable[str]) -> str:
    """Return a suggestion such as `; did you mean 'x' or 'y'?`, or an empty string if no name is similar."""
    quoted = [f"'{candidate}'" for candidate in find_nearest(name, names)]
    if not quoted:
        return ""
    one_of = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"
    return f"; did you mean {one_of}?"


def format_choices(name: str, names: Iterable[str]) -> str:
    """Return a suggestion for a mistyped name, followed by the valid names.

    If no name is similar, this only lists the valid names. If there is a suggestion, a long list of valid names is
    omitted.
    """
    valid = list(names)
    hint = format_suggestion(name, valid)
    return f"{hint}{list_names(valid)}" if hint else f"; valid: {', '.join(valid)}"


def list_names(valid: Sequence[str]) -> str:
    """Return a list such as ` Valid: x, y` to append to a suggestion, or an empty string if there are many names."""
    return f" Valid: {', '.join(valid)}" if len(valid) <= _MAX_LISTED else ""
