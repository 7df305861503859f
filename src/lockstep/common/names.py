"""The names nearest to a mistyped one, as an error message lists them."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

_FEW: Final = 8  # names that are listed though one is near
_LONGEST: Final = 100  # characters of a name that may be a mistyped one; looking takes long


def nearest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` of `names` that look like `name`, the nearest first."""
    if len(name) > _LONGEST:
        return []
    spelled = {each.lower(): each for each in names}
    return [spelled[close] for close in difflib.get_close_matches(name.lower(), spelled, n=count)]


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean 'x' or 'y'?`, or nothing where no name is near."""
    near = [f"'{each}'" for each in nearest(name, names)]
    if not near:
        return ""
    one_of = near[0] if len(near) == 1 else f"{', '.join(near[:-1])} or {near[-1]}"
    return f"; did you mean {one_of}?"


def choices(name: str, names: Iterable[str]) -> str:
    """Return the suggestion for a mistyped name, if any, and all that are valid, unless there are many."""
    valid = list(names)
    near = suggestion(name, valid)
    return f"{near}{list_names(valid)}" if near else f"; valid: {', '.join(valid)}"


def list_names(valid: Sequence[str]) -> str:
    """Return ` Valid: x, y` for behind a suggestion, or nothing where there are many."""
    return f" Valid: {', '.join(valid)}" if len(valid) <= _FEW else ""
