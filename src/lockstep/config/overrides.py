"""Overrides from the command line, `a.b.c=value`, set on top of a document."""

import copy
from collections.abc import Sequence
from typing import Any, Final

from lockstep.config.document import DEEPEST, UNREADABLE, Document, KeyProblem, Path, SourcePosition, format_key, parse
from lockstep.config.wording import unknown
from lockstep.config.write import format_value

OVERRIDE: Final = SourcePosition("override")

# Keys whose bare value stands for a mapping with one key: overriding a second key must not lose the first.
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
    """Return the document with each override set, in their order: the last one of a key wins.

    An empty value unsets a key, which then has its default. A bare name sets the name of its section and leaves the
    other keys there; config/naming.py takes away those that went with the former name.
    """
    result = Document(copy.deepcopy(document.values), dict(document.places), list(document.problems))
    for override in overrides:
        key, equals, text = override.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            text = f"{format_value(override)} is not of the form key=value, such as recipe.batch=64"
            result.problems.append(KeyProblem(OVERRIDE, (), text))
        elif len(path) > DEEPEST:
            result.problems.append(KeyProblem(OVERRIDE, path, f"nested more than {DEEPEST} deep"))
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
        section, path = here, (*path, "name")  # what else stands there may still be meant
    forget_places(document, path)
    section[str(path[-1])] = value.values
    document.places.update(dict.fromkeys([(*path, *inner) for inner in value.places], OVERRIDE))


def _unset(document: Document, path: Path) -> None:
    """Remove a key; no section is made on the way to one that is not there, since `ema: {}` would switch it on."""
    if wrong := unknown(path):
        document.problems.append(KeyProblem(OVERRIDE, *wrong))
    section = document.values
    for depth, name in enumerate(path[:-1], start=1):
        inner = section.get(str(name))
        if not isinstance(inner, dict):
            if inner is None or SHORTHAND.get(path[:depth]) != path[depth]:
                return
            path = path[:depth]  # the bare value is what the key stands for
            break
        section = inner
    forget_places(document, path)
    section.pop(str(path[-1]), None)
    document.places[path] = OVERRIDE  # where the key is required, this is what to correct


def forget_places(document: Document, path: Path) -> None:
    """Forget where a key and all below it came from."""
    for old in [old for old in document.places if old[: len(path)] == path]:
        del document.places[old]


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
                document.places[here] = OVERRIDE
            elif here in SHORTHAND and not isinstance(inner, list):
                inner = {SHORTHAND[here]: inner}
                document.places[(*here, SHORTHAND[here])] = found or OVERRIDE
            else:
                text = f"{format_value(inner)} ({found}) has no keys below it; give {format_key(here)} as a whole"
                document.problems.append(KeyProblem(OVERRIDE, here, text))
                return None
            section[str(name)] = inner
        section = inner
    return section
