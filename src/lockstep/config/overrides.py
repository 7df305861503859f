"""Applies overrides from the command line, `a.b.c=value`, to a document."""

import copy
from collections.abc import Sequence
from typing import Any, Final

from lockstep.config.document import DEEPEST, UNREADABLE, Document, KeyProblem, Path, SourcePosition, format_key, parse
from lockstep.config.wording import unknown
from lockstep.config.write import format_value

OVERRIDE: Final = SourcePosition("override")

# Sections that can be written as a bare value, and the key that the value stands for. Overriding a different key of
# such a section must keep the bare value.
SHORTHAND: Final[dict[Path, str]] = {
    ("recipe", "model"): "name",
    ("recipe", "model", "weights"): "path",
    ("recipe", "data"): "name",
    ("recipe", "optimizer"): "name",
    ("recipe", "optimizer", "lr"): "value",
    ("recipe", "schedule"): "name",
    ("recipe", "loss"): "name",
    ("placement", "strategy"): "name",
    ("run", "start_from"): "run",
}


def apply(document: Document, overrides: Sequence[str]) -> Document:
    """Return a copy of the document with the overrides applied in order. The last override of a key wins.

    An empty value resets a key to its default. A bare name sets the `name` of its section and keeps the other keys.
    config/naming.py then removes the keys that belonged to the previous name. Invalid overrides are added to the
    problems of the document.
    """
    result = Document(copy.deepcopy(document.values), dict(document.places), list(document.problems))
    for override in overrides:
        key, equals, text = override.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            text = f"{format_value(override)} is not a key=value pair; write it like recipe.batch=64"
            result.problems.append(KeyProblem(OVERRIDE, (), text))
        elif len(path) > DEEPEST:
            result.problems.append(KeyProblem(OVERRIDE, path, f"nested more than {DEEPEST} levels deep"))
        elif text.strip():
            _set(result, path, text)
        else:
            _unset(result, path)
    return result


def _set(document: Document, path: Path, text: str) -> None:
    value = parse(text, "override")
    document.problems.extend(KeyProblem(OVERRIDE, (*path, *each.path), each.text) for each in value.problems)
    section = _enter(document, path[:-1])
    if section is None:
        return
    here = section.get(str(path[-1]))
    if isinstance(value.values, str) and isinstance(here, dict) and SHORTHAND.get(path) == "name":
        section, path = here, (*path, "name")  # the other keys of the section may still apply
    forget_places(document, path)
    section[str(path[-1])] = value.values
    document.places.update(dict.fromkeys([(*path, *inner) for inner in value.places], OVERRIDE))


def _unset(document: Document, path: Path) -> None:
    """Remove a key. Missing sections on its path are not created, since for example `ema: {}` would enable EMA."""
    if wrong := unknown(path):
        document.problems.append(KeyProblem(OVERRIDE, *wrong))
    section = document.values
    for depth, name in enumerate(path[:-1], start=1):
        inner = section.get(str(name))
        if not isinstance(inner, dict):
            if inner is None or SHORTHAND.get(path[:depth]) != path[depth]:
                return
            path = path[:depth]  # the bare value stands for this key
            break
        section = inner
    forget_places(document, path)
    section.pop(str(path[-1]), None)
    document.places[path] = OVERRIDE  # the position for errors if the key is required


def forget_places(document: Document, path: Path) -> None:
    """Forget the positions of a key and of all keys below it."""
    for old in [old for old in document.places if old[: len(path)] == path]:
        del document.places[old]


def _enter(document: Document, path: Path) -> dict[str, Any] | None:
    """Return the mapping at `path`, and create it if needed. Returns None if a different value is in the way."""
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
                document.places[here] = OVERRIDE
            elif here in SHORTHAND and not isinstance(inner, list):
                inner = {SHORTHAND[here]: inner}
                document.places[(*here, SHORTHAND[here])] = found or OVERRIDE
            else:
                text = f"{format_value(inner)} ({found}) has no keys below it; set {format_key(here)} as a whole"
                document.problems.append(KeyProblem(OVERRIDE, here, text))
                return None
            section[str(name)] = inner
        section = inner
    return section
