"""Translates the keys of another framework, by a table and by code, and records the result for each key."""

import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Final, final

from lockstep.config import write
from lockstep.config.document import format_key, parse
from lockstep.errors import UsageError

_WIDTH: Final = 120


@dataclass(frozen=True)
class KeyTable:
    """The keys of a framework, from the YAML file of its name in this folder. All keys are dotted.

    - `defaults`: All keys with their defaults. Unless the default is null, a value must have the type of the default.
    - `marks`: A file with one of these keys is of this framework. If empty, any key of the framework is enough.
    - `renamed`: Current keys by the names that older versions used.
    - `mapped`: The Lockstep key that has the same value.
    - `mapped_if_set`: Like `mapped`, for values that aren't empty or off.
    - `switches`: The Lockstep values to set if a key is on.
    - `unmapped`: Reasons, each with the keys or key patterns that have no counterpart for this reason.

    Keys that aren't in the table are rejected.
    """

    framework: str
    defaults: Mapping[str, Any]
    marks: Collection[str] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)  # key in an older version: current key
    mapped: Mapping[str, str] = field(default_factory=dict)
    mapped_if_set: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unmapped: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def knows(self, keys: Collection[str]) -> bool:
        """Return whether a file with these keys is of this framework."""
        return any(key in keys for key in self.marks or (*self.defaults, *self.renamed))


@cache
def table_of(framework: str) -> KeyTable:
    """Read the table of a framework."""
    file = Path(__file__).with_name(f"{framework}.yaml")
    table = parse(file.read_text(encoding="utf-8"), file.name).values
    defaults = {format_key(path): value for path, value in write.leaves(table["defaults"])}
    return KeyTable(**{**table, "defaults": defaults})


@dataclass(frozen=True)
class TranslatedConfig:
    """The translated configuration.

    - `values`: The sections recipe, placement and run.
    - `origins`: The origin of each value, by dotted key. It names the keys of the framework.
    - `unmapped`: The reason why a key that the file sets has no counterpart, by key of the framework.
    - `notes`: Other differences between the framework and Lockstep.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    unmapped: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def to_yaml(self, heading: str) -> str:
        """Return it as the YAML text of a recipe. Comments list the origin of each value, and `remarks`."""
        lines = [*_comment(heading), *write.block(self.values, self.origins)]
        return "\n".join([*lines, *(line for remark in self.remarks() for line in _comment(remark))]) + "\n"

    def remarks(self) -> Iterator[str]:
        """Yield a line for the keys without a counterpart for each reason, then the notes."""
        for reason in dict.fromkeys(self.unmapped.values()):
            keys = [key for key, key_reason in self.unmapped.items() if key_reason == reason]
            yield f"not mapped: {', '.join(keys)}: {reason}"
        yield from self.notes


def type_mismatch(default: Any, value: Any) -> str:
    """Return the expected type of a value, or "" if the value has it. A default of None accepts any value."""
    if default is None or (default == "" and value is None):
        return ""
    # This comparison is exact for integers of any size, and False for NaN.
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, int):
        return "" if is_number and value == int(value) else "an integer"
    if isinstance(default, float):
        return "" if is_number else "a number"
    if isinstance(default, list):
        return "" if isinstance(value, list) else "a list"
    return "" if isinstance(value, str) else "text"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        write.printable(text), _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
    )


@final
class Translation:
    """A translation in progress: the table translates its keys, and code translates the rest one by one.

    `file_values` are the keys and values of a file, and `gpus` the number of GPUs that it is for. A key that neither
    the table nor code uses is a bug in this package, and `finish` raises AssertionError.
    """

    def __init__(self, table: KeyTable, file_values: Mapping[str, Any], gpus: int) -> None:
        self.gpus = gpus
        self._table = table
        self._file_values = file_values
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        self._unmapped: dict[str, str] = {}
        self._notes: list[str] = []
        self._used: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key of the framework, or its default. Raises UsageError if the type is wrong."""
        self._used.add(key)
        default = self._table.defaults.get(key)
        value = self._file_values.get(key)
        if value is None:
            return default
        if expected := type_mismatch(default, value):
            raise UsageError(f"{key}: expected {expected}, got {write.format_value(value)}")
        return value

    def __contains__(self, key: str) -> bool:
        """Return whether the file or the command line sets a key of the framework."""
        return key in self._file_values

    def set(self, path: str, value: Any, origin: str) -> None:
        """Set a dotted Lockstep key. `origin` describes the source of its value."""
        *sections, name = path.split(".")
        section = self._values
        for key in sections:
            section = section.setdefault(key, {})
        section[name] = value
        self._origins[path] = origin
        if isinstance(value, dict):
            self._origins |= {f"{path}.{format_key(inner)}": origin for inner, _ in write.leaves(value)}

    def copy(self, key: str, path: str) -> None:
        """Set a Lockstep key to the value of a key of the framework."""
        self.set(path, self[key], key)

    def skip(self, reason: str, *keys: str) -> None:
        """Record why keys of the framework, or key patterns, have no counterpart. The first reason for a key is kept.

        Keys that appear in the origin of a value have a counterpart, and `finish` ignores their reasons.
        """
        for key in {**self._table.defaults, **self._file_values}:
            if any(fnmatchcase(key, pattern) for pattern in keys):
                self._used.add(key)
                self._unmapped.setdefault(key, reason)

    def note(self, text: str) -> None:
        """Record another difference between the framework and Lockstep."""
        self._notes.append(text)

    def copy_listed(self) -> None:
        """Translate the keys for which the table has a counterpart."""
        for key, path in self._table.mapped.items():
            if self[key] is not None:
                self.copy(key, path)
        for key, path in self._table.mapped_if_set.items():
            if self[key]:
                self.copy(key, path)
        for key, lockstep_values in self._table.switches.items():
            for path, value in lockstep_values.items() if self[key] else ():
                self.set(path, value, key)

    def finish(self) -> TranslatedConfig:
        """Return the translated configuration, with the table's reasons for keys without a counterpart."""
        for reason, keys in self._table.unmapped.items():
            self.skip(reason, *keys)
        unused = [key for key in {**self._table.defaults, **self._file_values} if key not in self._used]
        if unused:
            raise AssertionError(f"keys without a translation: {', '.join(unused)}")
        mapped = {word.strip(",") for origin in self._origins.values() for word in origin.split()}
        unmapped = {
            key: reason for key, reason in self._unmapped.items() if key in self._file_values and key not in mapped
        }
        return TranslatedConfig(self._values, self._origins, unmapped, tuple(self._notes))
