"""Writes a configuration as YAML that parses to the same values, with the origin of each value as a comment."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from lockstep.config.document import Path, format_key, parse_scalar

_PLAIN: Final = re.compile(r"[A-Za-z_/][\w./+-]*(:[\w./+-]+)*", re.ASCII)
_ESCAPES: Final = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}
_COMMENT_COLUMN: Final = 40


def iterate_leaves(tree: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of each leaf, which is an empty mapping or any value that isn't a mapping."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from iterate_leaves(value, (*path, name))
        else:
            yield (*path, name), value


def format_block(tree: Mapping[str, Any], origins: Mapping[str, str], path: Path = ()) -> Iterator[str]:
    """Yield the lines of a YAML block mapping. `origins` maps dotted keys to the comment on their line."""
    for name, value in tree.items():
        key_path = (*path, name)
        line = f"{'  ' * len(path)}{format_flow(name)}:"
        if isinstance(value, dict) and value:
            yield line
            yield from format_block(value, origins, key_path)
        else:
            line = f"{line} {format_flow(value)}".ljust(_COMMENT_COLUMN)
            yield f"{line}  # {to_printable(origins[format_key(key_path)])}"


def format_flow(value: Any) -> str:
    """Format a value as YAML on a single line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{format_flow(name)}: {format_flow(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_flow, value)) + "]"
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and isinstance(parse_scalar(value), str):
            return value
        return f'"{"".join(map(_escape, value))}"'
    if isinstance(value, float):
        return _format_float(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)


def format_value(value: Any) -> str:
    """Format a value for an error message, in at most 60 characters. Strings are quoted, and mappings aren't shown."""
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    text = repr(value) if isinstance(value, str) else format_flow(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _escape(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    return character if character.isprintable() else f"\\U{ord(character):08X}"


def _format_float(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"


def to_printable(text: str) -> str:
    """Replace unprintable characters with `?`."""
    # A file name can contain a line break, for example, which would end the comment.
    return "".join(character if character.isprintable() else "?" for character in text)
