"""Applies command-line overrides such as `a.b.c=value` to a document."""

import copy
from collections.abc import Sequence
from typing import Any, Final

from lockstep.config.document import (
    MAX_DEPTH,
    UNREADABLE,
    Document,
    KeyProblem,
    Path,
    SourcePosition,
    format_key,
    parse,
)
from lockstep.config.wording import find_unknown_key
from lockstep.config.write import format_value

OVERRIDE: Final = SourcePosition("override")

# Maps each section that can be written as a bare value to the key that the bare value sets. If an override sets a
# different key of the section, the bare value becomes the value of its key.
SHORTHAND_KEYS: Final[dict[Path, str]] = {
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


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """Return a copy of the document with the overrides applied in order.

    An empty value resets a key to its default. A bare name only sets the `name` of its section. Keys that only applied
    to the previous name are removed later (config/naming.py). Invalid overrides are added to the problems of the
    document.
    """
    updated = Document(copy.deepcopy(document.values), dict(document.positions), list(document.problems))
    for override in overrides:
        key, equals, text = override.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            text = f"{format_value(override)} is not a key=value pair; write it like recipe.batch=64"
            updated.problems.append(KeyProblem(OVERRIDE, (), text))
        elif len(path) > MAX_DEPTH:
            updated.problems.append(KeyProblem(OVERRIDE, path, f"nested more than {MAX_DEPTH} levels deep"))
        elif text.strip():
            _set_key(updated, path, text)
        else:
            _unset_key(updated, path)
    return updated


def _set_key(document: Document, path: Path, value_text: str) -> None:
    value = parse(value_text, "override")
    document.problems.extend(KeyProblem(OVERRIDE, (*path, *problem.path), problem.text) for problem in value.problems)
    section = _open_section(document, path[:-1])
    if section is None:
        return
    current = section.get(str(path[-1]))
    if isinstance(value.values, str) and isinstance(current, dict) and SHORTHAND_KEYS.get(path) == "name":
        section, path = current, (*path, "name")  # keeps the remaining keys of the section
    remove_positions(document, path)
    section[str(path[-1])] = value.values
    document.positions.update(dict.fromkeys([(*path, *inner) for inner in value.positions], OVERRIDE))


def _unset_key(document: Document, path: Path) -> None:
    """Remove a key without creating missing sections on its path, because even an empty `ema` section enables EMA."""
    if problem := find_unknown_key(path):
        document.problems.append(KeyProblem(OVERRIDE, *problem))
    section = document.values
    for depth, name in enumerate(path[:-1], start=1):
        inner = section.get(str(name))
        if not isinstance(inner, dict):
            if inner is None or SHORTHAND_KEYS.get(path[:depth]) != path[depth]:
                return
            path = path[:depth]  # the section is a bare value that sets this key
            break
        section = inner
    remove_positions(document, path)
    section.pop(str(path[-1]), None)
    document.positions[path] = OVERRIDE  # used in the error message if the key is required


def remove_positions(document: Document, path: Path) -> None:
    """Remove the positions of a key and of all keys nested below it."""
    for outdated in [outdated for outdated in document.positions if outdated[: len(path)] == path]:
        del document.positions[outdated]


def _open_section(document: Document, path: Path) -> dict[str, Any] | None:
    """Return the mapping at `path`. Creates the mapping if it doesn't exist.

    If a value on the path isn't a mapping, this function adds a problem to the document and returns None.
    """
    section: dict[str, Any] = document.values
    for depth, name in enumerate(path, start=1):
        prefix = path[:depth]
        inner = section.get(str(name))
        if not isinstance(inner, dict):
            position = document.positions.get(prefix)
            if inner is UNREADABLE:
                return {}
            if inner is None:
                inner = {}
                document.positions[prefix] = OVERRIDE
            elif prefix in SHORTHAND_KEYS and not isinstance(inner, list):
                inner = {SHORTHAND_KEYS[prefix]: inner}
                document.positions[(*prefix, SHORTHAND_KEYS[prefix])] = position or OVERRIDE
            else:
                text = f"{format_value(inner)} ({position}) has no keys below it; set {format_key(prefix)} as a whole"
                document.problems.append(KeyProblem(OVERRIDE, prefix, text))
                return None
            section[str(name)] = inner
        section = inner
    return section
