"""Sets keys in YAML text while preserving its comments, order and quotes."""

from collections.abc import Mapping
from typing import Any

import yaml

from lockstep.config.document import Path, parse
from lockstep.config.write import format_flow
from lockstep.errors import UsageError


def set_values(text: str, source: str, values: Mapping[Path, Any]) -> str:
    """Set keys in the YAML text of a mapping, and return the edited text.

    `values` maps the paths of keys to their new values. Missing keys are added. `source` is the file name for error
    messages. Raises UsageError if the edited text doesn't parse to the expected values.
    """
    expected = parse(text, source).values
    for path, value in values.items():
        section = expected
        for name in path[:-1]:
            section[name] = section = section.get(name) or {}
        section[path[-1]] = value
        text = _replace_value(text, path, value)
    document = parse(text, source)
    if document.problems or document.values != expected:
        keys = ", ".join(".".join(map(str, path)) for path in values)
        raise UsageError(f"{source}: cannot set {keys} in a file with this formatting; edit the file by hand")
    return text


def _replace_value(text: str, path: Path, value: Any) -> str:
    """Replace the value of a key. If the key is missing, add it to the innermost existing mapping on its path."""
    node: Any = yaml.compose(text, yaml.SafeLoader)
    key = None
    for depth, name in enumerate(path):
        if not isinstance(node, yaml.MappingNode):  # the key has no value yet, so its value becomes a mapping
            break
        pairs = {key.value: (key, inner) for key, inner in node.value}
        if name not in pairs:
            return _insert_key(text, node, f"{name}: {format_flow(_nest_value(path[depth + 1 :], value))}")
        key, node = pairs[name]
    else:
        depth = len(path)
    assert key is not None
    return (
        f"{text[: key.end_mark.index]}: {format_flow(_nest_value(path[depth:], value))}{text[_find_value_end(node) :]}"
    )


def _nest_value(path: Path, value: Any) -> Any:
    for name in reversed(path):
        value = {name: value}
    return value


def _insert_key(text: str, mapping: yaml.MappingNode, entry: str) -> str:
    start = mapping.start_mark
    if mapping.flow_style:
        position = start.index + 1
        return f"{text[:position]}{entry}{', ' if mapping.value else ''}{text[position:]}"
    end = _find_value_end(mapping)
    end += len(text[end:].partition("\n")[0])  # skip a comment on the last line
    return f"{text[:end]}\n{' ' * start.column}{entry}{text[end:]}"


def _find_value_end(node: Any) -> int:
    """Return the index of the end of a node in the text, before blank lines and comments that follow its last value."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _find_value_end(last[1] if isinstance(node, yaml.MappingNode) else last)
    return int(node.end_mark.index)
