"""A configuration of another framework, and what became of each of its keys: by its table, and code for the rest."""

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
    """What is known of a framework, from the YAML file of its name in this folder. All keys are dotted.

    `defaults` are those of its keys: a value is of the type of its default, where that is not null. A file that has one
    of the `marks` is of this framework; without any, one that has one of its keys. `taken` names the key of ours with
    the same value, `taken_where_set` does so for values that are not empty or off, and `switches` gives what follows
    from a key that is on. `left` has reasons, each with the keys, or patterns of them, that have no counterpart for it.
    Keys that the table does not have are refused.
    """

    framework: str
    defaults: Mapping[str, Any]
    marks: Collection[str] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)  # keys by the names of older versions
    taken: Mapping[str, str] = field(default_factory=dict)
    taken_where_set: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    left: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def knows(self, typed: Collection[str]) -> bool:
        """Say whether the keys of a file are of this framework."""
        return any(key in typed for key in self.marks or (*self.defaults, *self.renamed))


@cache
def table_of(framework: str) -> KeyTable:
    """Read the table of a framework."""
    file = Path(__file__).with_name(f"{framework}.yaml")
    found = parse(file.read_text(encoding="utf-8"), file.name).values
    defaults = {format_key(path): value for path, value in write.leaves(found["defaults"])}
    return KeyTable(**{**found, "defaults": defaults})


@dataclass(frozen=True)
class TranslatedConfig:
    """Our configuration: `values` with the sections recipe, placement and run.

    `origins` has for each of its dotted keys those that it came from, `left` for each of the others why it has no
    counterpart, and `notes` what else is not as it was there.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    left: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def to_yaml(self, heading: str) -> str:
        """Write it as a recipe, in which comments say where each value is from, and what is left out."""
        lines = [*_comment(heading), *write.block(self.values, self.origins)]
        return "\n".join([*lines, *(line for remark in self.remarks() for line in _comment(remark))]) + "\n"

    def remarks(self) -> Iterator[str]:
        """Yield what is left out, and what is not as it was there."""
        for reason in dict.fromkeys(self.left.values()):
            keys = [key for key, own in self.left.items() if own == reason]
            yield f"not mapped: {', '.join(keys)}: {reason}"
        yield from self.notes


def type_mismatch(default: Any, value: Any) -> str:
    """Return what a value should be, or nothing where it is that; a default of None says nothing about it."""
    if default is None or (default == "" and value is None):
        return ""
    # The comparison is exact for whole numbers of any length, and no NaN passes it.
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, int):
        return "" if number and value == int(value) else "a whole number"
    if isinstance(default, float):
        return "" if number else "a number"
    if isinstance(default, list):
        return "" if isinstance(value, list) else "a list"
    return "" if isinstance(value, str) else "text"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        write.printable(text), _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
    )


@final
class Translation:
    """Keys that are turned into ours: those that its table takes, and those that code looks at, one by one.

    `typed` are the keys of a file, and `gpus` the number of GPUs that it is for. Of all keys, those that neither the
    table nor code does something with are an error of this code: none is passed over.
    """

    def __init__(self, table: KeyTable, typed: Mapping[str, Any], gpus: int) -> None:
        self.gpus = gpus
        self._table = table
        self._typed = typed
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        self._left: dict[str, str] = {}
        self._notes: list[str] = []
        self._used: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key of theirs, or its default; UsageError where it is of another type."""
        self._used.add(key)
        default = self._table.defaults.get(key)
        value = self._typed.get(key)
        if value is None:
            return default
        if wanted := type_mismatch(default, value):
            raise UsageError(f"{key}: expected {wanted}, got {write.format_value(value)}")
        return value

    def __contains__(self, key: str) -> bool:
        """Whether somebody typed a key of theirs."""
        return key in self._typed

    def set(self, path: str, value: Any, origin: str) -> None:
        """Set a dotted key of ours; `origin` says what it follows from."""
        *sections, name = path.split(".")
        section = self._values
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
        self._origins[path] = origin
        if isinstance(value, dict):
            self._origins |= {f"{path}.{format_key(inner)}": origin for inner, _ in write.leaves(value)}

    def take(self, key: str, path: str) -> None:
        """Set a key of ours to the value of one of theirs."""
        self.set(path, self[key], key)

    def leave(self, reason: str, *keys: str) -> None:
        """Say why these keys of theirs, or patterns of them, have no counterpart, unless something follows from them.

        The first reason counts.
        """
        for key in {**self._table.defaults, **self._typed}:
            if any(fnmatchcase(key, each) for each in keys):
                self._used.add(key)
                self._left.setdefault(key, reason)

    def note(self, text: str) -> None:
        """Say what else is not as it was there."""
        self._notes.append(text)

    def take_listed(self) -> None:
        """Take what the table says has a counterpart."""
        for key, path in self._table.taken.items():
            if self[key] is not None:
                self.take(key, path)
        for key, path in self._table.taken_where_set.items():
            if self[key]:
                self.take(key, path)
        for key, follows in self._table.switches.items():
            for path, value in follows.items() if self[key] else ():
                self.set(path, value, key)

    def done(self) -> TranslatedConfig:
        """Return the whole, with the reasons of the table for what is left out."""
        for reason, keys in self._table.left.items():
            self.leave(reason, *keys)
        forgotten = [key for key in {**self._table.defaults, **self._typed} if key not in self._used]
        if forgotten:
            raise AssertionError(f"nothing was done with {', '.join(forgotten)}")
        mapped = {word.strip(",") for origin in self._origins.values() for word in origin.split()}
        left = {key: reason for key, reason in self._left.items() if key in self._typed and key not in mapped}
        return TranslatedConfig(self._values, self._origins, left, tuple(self._notes))
