"""A YAML parser that returns plain values and the position of every key.

This parser uses the events of PyYAML, but not its loaders. The loaders parse `1e-3` as text and `on` as true (YAML
1.1), accept duplicate keys, and discard positions. They also follow aliases, so that nine lines can expand to a billion
values. This parser follows the core schema of YAML 1.2, and reports aliases, tags and duplicate keys as problems.

We also tested ruamel.yaml 0.19.1. Its loaders stop at the first error, and convert dates and `1_000`. With
its events, this parser takes 1.3 to 1.6 times as long.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple, final

import yaml

Path = tuple[str | int, ...]


class Placeholder(Enum):
    """Stands for an invalid value that has already been reported. An enum, because copying a member returns it."""

    UNREADABLE = "unreadable"


UNREADABLE: Final = Placeholder.UNREADABLE

MAX_DEPTH: Final = 32
_MAX_NODES: Final = 10_000  # maximum number of keys and values; PyYAML takes about a second to parse this many
_MAX_KEY_LENGTH: Final = 200  # longer keys are truncated in messages
# Prefixes of PyYAML errors that often point to a line after the actual mistake.
_LATE_ERRORS: Final = ("mapping values are not", "could not find expected ':'", "expected <block end>")
_NOT_BLANK: Final = re.compile(r"\s*[^\s#]")
_PLAIN_VALUE: Final = re.compile(r"\s*[\w.]+: +[\w./{[]")  # a key and its value on the same line
_MISSING_SPACE: Final = re.compile(r"\s*(- +)*[\w.]+:(?=\S)")
_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE: Final = frozenset({"true", "True", "TRUE"})
_FALSE: Final = frozenset({"false", "False", "FALSE"})
_INT: Final = re.compile(r"[-+]?[0-9]+")
_OCTAL_OR_HEX: Final = re.compile(r"0o[0-7]{1,21}|0x[0-9a-fA-F]{1,16}")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE: Final = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class SourcePosition(NamedTuple):
    """The position of a value in a file. Lines and columns count from 1, and are 0 if there is no file."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


class KeyProblem(NamedTuple):
    """A problem with the key at `path`, or with the whole document if the path is empty."""

    position: SourcePosition
    path: Path
    text: str

    def __str__(self) -> str:
        key = format_key(self.path)
        key = key if len(key) <= _MAX_KEY_LENGTH else f"{key[: _MAX_KEY_LENGTH - 3]}..."
        position = str(self.position)
        position += "  " if ":" in position else " "  # two spaces separate a line number from the problem
        return f"{position}{key}: {self.text}" if key else f"{position}{self.text}"


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed YAML document: its values, the positions of its keys and list items by path, and its problems.

    The empty path maps to the position of the document itself.
    """

    values: Any
    positions: dict[Path, SourcePosition]
    problems: list[KeyProblem]


def format_key(path: Path) -> str:
    """Format a path as a dotted key, such as `recipe.optimizer.lr`."""
    return ".".join(map(str, path))


def find_position(positions: dict[Path, SourcePosition], path: Path) -> SourcePosition:
    """Return the position of a key, or of the innermost enclosing mapping or list that has a position."""
    while path not in positions:
        path = path[:-1]
    return positions[path]


def get_mapping(values: Any, name: str) -> dict[str, Any]:
    """Return the mapping at the top-level key `name`, or an empty mapping if there is no such mapping."""
    inner = values.get(name) if isinstance(values, dict) else None
    return inner if isinstance(inner, dict) else {}


def parse(text: str, source: str) -> Document:
    """Parse a YAML document. Problems don't raise an error, but are listed in the result."""
    reader = _Reader(text, source)
    try:
        values = reader.read_document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = reader.make_position(mark) if mark else SourcePosition(source)
        reason = error.problem or error.context or ""
        if reason.startswith(_LATE_ERRORS):
            position, reason = _find_likely_mistake(text, position) or (position, reason)
        values, reason = UNREADABLE, "a tab; use spaces" if r"'\t'" in reason else reason
        reader.problems.append(KeyProblem(position, (), f"not valid YAML: {reason}"))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        position = SourcePosition(source, line, column)
        values = UNREADABLE
        text = f"character {error.character:#04x} is not allowed in YAML; save the file as plain text in UTF-8"
        reader.problems.append(KeyProblem(position, (), text))
    return Document(values, reader.positions, reader.problems)


def _find_likely_mistake(text: str, position: SourcePosition) -> tuple[SourcePosition, str] | None:
    """Return the position and description of a likely mistake in the line of a YAML error or the line above it.

    Detects a missing space after a colon, and wrong indentation. Returns None if both lines look correct.
    """
    lines = [(row, line) for row, line in enumerate(text.splitlines()[: position.line], 1) if _NOT_BLANK.match(line)]
    previous, current = [(0, ":"), (0, ":"), *lines][-2:]
    for row, line in (previous, current):
        if colon := _MISSING_SPACE.match(line):
            return position._replace(line=row, column=colon.end()), "a space is missing after the colon"
    outer, inner = (len(line) - len(line.lstrip()) for _, line in (previous, current))
    if inner > outer and _PLAIN_VALUE.match(previous[1]) and current[1].count(": ") < 2:
        return position._replace(line=current[0], column=inner + 1), "indented further than the line above"
    return None


def parse_scalar(text: str) -> Any:
    """Return the value of a plain (unquoted) scalar according to the core schema of YAML 1.2."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    try:
        return _parse_number(text)
    except ValueError:  # Python limits the number of digits in an integer
        return text


def _parse_number(text: str) -> Any:
    if _INT.fullmatch(text):
        return int(text)
    if _OCTAL_OR_HEX.fullmatch(text):
        return int(text, 0)
    if _INFINITE.fullmatch(text):
        return float(text.replace(".", "", 1))
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


@final
class _Reader:
    """Builds the values of a document from YAML events."""

    def __init__(self, text: str, source: str) -> None:
        self._source = source
        self._events: Iterator[yaml.Event] = yaml.parse(text, Loader=yaml.SafeLoader)
        self._node_count = 0
        self.positions: dict[Path, SourcePosition] = {(): SourcePosition(source, 1, 1)}
        self.problems: list[KeyProblem] = []

    def make_position(self, mark: Any) -> SourcePosition:
        return SourcePosition(self._source, mark.line + 1, mark.column + 1)

    def read_document(self) -> Any:
        values = None
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._add_problem(event, (), "a second document begins here; keep one")
            elif isinstance(event, yaml.NodeEvent):
                value = self._read_value(event, ())
                values = value if documents == 1 else values
        return values

    def _read_value(self, event: Any, path: Path) -> Any:
        self.positions.setdefault(path, self.make_position(event.start_mark))
        self._check_limits(event, len(path))
        if isinstance(event, yaml.AliasEvent):
            return self._add_problem(
                event, path, f"aliases such as *{event.anchor} are not allowed; write the value out"
            )
        if isinstance(event, yaml.ScalarEvent):
            value = parse_scalar(event.value) if event.implicit[0] else event.value  # `implicit[0]`: without quotes
        elif isinstance(event, yaml.MappingStartEvent):
            value = self._read_mapping(path)
        else:
            value = self._read_list(path)
        return (
            value
            if event.tag is None
            else self._add_problem(event, path, f"the tag {event.tag} is not allowed; remove it")
        )

    def _read_mapping(self, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self._add_problem(event, path, "a key must be a word")
                self._skip(event)
                self._skip(next(self._events))
                continue
            inner = (*path, event.value)
            if event.value in values:
                first = self.positions[inner]
                self._add_problem(event, inner, f"set twice, first at {first.line}:{first.column}; keep one of the two")
                self._skip(next(self._events))
                continue
            self.positions[inner] = self.make_position(event.start_mark)
            values[event.value] = self._read_value(next(self._events), inner)
        return values

    def _read_list(self, path: Path) -> list[Any]:
        values: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            values.append(self._read_value(event, (*path, len(values))))
        return values

    def _skip(self, event: yaml.Event) -> None:
        """Skip all events of the value that begins with `event`."""
        depth = 0
        while True:
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth == 0:
                return
            self._check_limits(event, depth)
            event = next(self._events)

    def _check_limits(self, event: Any, depth: int) -> None:
        # Stop parsing, because PyYAML takes quadratic time in the nesting depth.
        if depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"nested more than {MAX_DEPTH} levels deep", problem_mark=event.start_mark
            )
        self._node_count += 1
        if self._node_count > _MAX_NODES:
            raise yaml.MarkedYAMLError(
                problem=f"more than {_MAX_NODES:,} keys and values", problem_mark=event.start_mark
            )

    def _add_problem(self, event: yaml.Event, path: Path, text: str) -> Any:
        self.problems.append(KeyProblem(self.make_position(event.start_mark), path, text))
        return UNREADABLE
