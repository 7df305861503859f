"""Overrides from the command line, `a.b.c=value`, set on top of a document."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

from lockstep.config.document import UNREADABLE, Document, Path, Place, Problem, dotted, parse
from lockstep.config.write import shown

_PLACE: Final = Place("override")

# Keys whose bare value stands for a mapping with one key: overriding a second key must not lose the first.
_SHORTHAND: Final[dict[Path, str]] = {
    ("recipe", "optimizer", "lr"): "value",
    ("placement", "strategy"): "name",
}


def apply(document: Document, overrides: Sequence[str]) -> Document:
    """Return the document with each override set, in their order: the last one of a key wins."""
    result = copy.deepcopy(document)
    for override in overrides:
        key, equals, text = override.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            text = f"'{override}' is not of the form key=value, such as recipe.batch=64"
            result.problems.append(Problem(_PLACE, (), text))
        else:
            _set(result, path, text)
    return result


def _set(document: Document, path: Path, text: str) -> None:
    value = parse(text, "override")
    document.problems.extend(Problem(_PLACE, (*path, *each.path), each.text) for each in value.problems)
    section = _enter(document, path[:-1])
    if section is None:
        return
    for old in [old for old in document.places if old[: len(path)] == path]:
        del document.places[old]
    section[str(path[-1])] = value.values
    document.places.update(dict.fromkeys([(*path, *inner) for inner in value.places], _PLACE))


def _enter(document: Document, path: Path) -> dict[str, Any] | None:
    """Return the mapping at `path`, made where there is none; None where another value is in the way."""
    section: dict[str, Any] = document.values
    for depth, name in enumerate(path, start=1):
        here = path[:depth]
        inner = section.get(str(name))
        if not isinstance(inner, dict):
            found = document.places.get(here)
            if inner is UNREADABLE:
                return {}
            if inner is None:
                inner = {}
                document.places[here] = _PLACE
            elif here in _SHORTHAND and not isinstance(inner, list):
                inner = {_SHORTHAND[here]: inner}
                document.places[(*here, _SHORTHAND[here])] = found or _PLACE
            else:
                text = f"{shown(inner)} ({found}) has no keys below it; give {dotted(here)} as a whole"
                document.problems.append(Problem(_PLACE, here, text))
                return None
            section[str(name)] = inner
        section = inner
    return section
