"""Translates the keys of another framework with a key table and with code, and records the result for each key."""

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

_MAX_LINE_LENGTH: Final = 120


@dataclass(frozen=True)
class KeyTable:
    """The keys of a framework and their translations, read from the framework's YAML file in this folder.

    - `defaults`: All keys with their default values. A value must have the type of the default, unless it is null.
    - `marks`: The keys that identify a file of the framework. If empty, any key of the framework identifies it.
    - `renamed`: Maps the names of keys in older versions to their current names.
    - `mapped`: Maps keys to the Lockstep keys with the same values.
    - `mapped_if_set`: Like `mapped`, but values that are empty or false are ignored.
    - `switches`: Maps boolean keys to the Lockstep values to set if the key is true.
    - `unmapped`: Maps reasons to the keys or key patterns that have no counterpart.

    All keys are dotted. Keys that aren't in the table are rejected.
    """

    framework: str
    defaults: Mapping[str, Any]
    marks: Collection[str] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    mapped: Mapping[str, str] = field(default_factory=dict)
    mapped_if_set: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unmapped: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def matches(self, keys: Collection[str]) -> bool:
        """Return whether a file with these keys is a configuration of this framework."""
        return any(key in keys for key in self.marks or (*self.defaults, *self.renamed))


@cache
def read_key_table(framework: str) -> KeyTable:
    """Read the key table of a framework."""
    file = Path(__file__).with_name(f"{framework}.yaml")
    table = parse(file.read_text(encoding="utf-8"), file.name).values
    defaults = {format_key(path): value for path, value in write.iterate_leaves(table["defaults"])}
    return KeyTable(**{**table, "defaults": defaults})


@dataclass(frozen=True)
class TranslatedConfig:
    """A translated configuration.

    - `values`: The sections recipe, placement and run.
    - `origins`: Maps dotted Lockstep keys to the origin of their value, such as a key of the framework.
    - `unmapped`: Maps each key in the file that has no counterpart to the reason why.
    - `notes`: Additional differences between the framework and Lockstep.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    unmapped: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def to_yaml(self, heading: str) -> str:
        """Return the recipe as YAML, with `heading`, the origin of each value, and `remarks` as comments."""
        lines = [*_wrap_comment(heading), *write.format_block(self.values, self.origins)]
        return "\n".join([*lines, *(line for remark in self.remarks() for line in _wrap_comment(remark))]) + "\n"

    def remarks(self) -> Iterator[str]:
        """Yield a line for each reason, with its keys that have no counterpart, followed by the notes."""
        for reason in dict.fromkeys(self.unmapped.values()):
            keys = [key for key, key_reason in self.unmapped.items() if key_reason == reason]
            yield f"not mapped: {', '.join(keys)}: {reason}"
        yield from self.notes


def describe_type_mismatch(default: Any, value: Any) -> str:
    """Return the expected type as text, or an empty string if the value has the type of the default.

    If the default is None, any value is accepted.
    """
    if default is None or (default == "" and value is None):
        return ""
    # Comparing with the largest float works for integers of any size, and is False for NaN.
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


def _wrap_comment(text: str) -> list[str]:
    return textwrap.wrap(
        write.to_printable(text),
        _MAX_LINE_LENGTH,
        initial_indent="# ",
        subsequent_indent="#   ",
        break_on_hyphens=False,
    )


@final
class Translation:
    """A translation in progress. Most keys are translated by the key table, and the remaining keys by code.

    `file_values` maps the dotted keys in the file to their values. `num_gpus` is the number of GPUs that the file was
    written for. If neither the table nor the code handles a key, `finish` raises AssertionError.
    """

    def __init__(self, table: KeyTable, file_values: Mapping[str, Any], num_gpus: int) -> None:
        self.num_gpus = num_gpus
        self._table = table
        self._file_values = file_values
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        self._unmapped: dict[str, str] = {}
        self._notes: list[str] = []
        self._handled_keys: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        """Return the value or the default of a framework key. Raises UsageError if the value has the wrong type."""
        self._handled_keys.add(key)
        default = self._table.defaults.get(key)
        value = self._file_values.get(key)
        if value is None:
            return default
        if expected := describe_type_mismatch(default, value):
            raise UsageError(f"{key}: expected {expected}, got {write.format_value(value)}")
        return value

    def __contains__(self, key: str) -> bool:
        """Return whether a framework key is set in the file or on the command line."""
        return key in self._file_values

    def set(self, path: str, value: Any, origin: str) -> None:
        """Set the dotted Lockstep key `path`. `origin` describes where the value comes from."""
        *sections, name = path.split(".")
        section = self._values
        for key in sections:
            section = section.setdefault(key, {})
        section[name] = value
        self._origins[path] = origin
        if isinstance(value, dict):
            self._origins |= {f"{path}.{format_key(inner)}": origin for inner, _ in write.iterate_leaves(value)}

    def copy(self, key: str, path: str) -> None:
        """Set the dotted Lockstep key `path` to the value of a framework key."""
        self.set(path, self[key], key)

    def skip(self, reason: str, *keys: str) -> None:
        """Record why keys of the other framework, or key patterns, have no corresponding Lockstep key.

        The first reason for a key is kept, but `finish` drops it if a Lockstep value was derived from the key.
        """
        for key in {**self._table.defaults, **self._file_values}:
            if any(fnmatchcase(key, pattern) for pattern in keys):
                self._handled_keys.add(key)
                self._unmapped.setdefault(key, reason)

    def add_note(self, text: str) -> None:
        """Record an additional difference between the framework and Lockstep."""
        self._notes.append(text)

    def copy_mapped_keys(self) -> None:
        """Translate all keys that the key table maps to Lockstep keys."""
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
        """Return the translated configuration. The key table supplies further reasons for unmapped keys."""
        for reason, keys in self._table.unmapped.items():
            self.skip(reason, *keys)
        unused = [key for key in {**self._table.defaults, **self._file_values} if key not in self._handled_keys]
        if unused:
            raise AssertionError(f"keys without a translation: {', '.join(unused)}")
        mapped = {word.strip(",") for origin in self._origins.values() for word in origin.split()}
        unmapped = {
            key: reason for key, reason in self._unmapped.items() if key in self._file_values and key not in mapped
        }
        return TranslatedConfig(self._values, self._origins, unmapped, tuple(self._notes))
