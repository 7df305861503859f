"""A configuration of another framework, and what became of each of its keys."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from lockstep.config import write
from lockstep.config.document import dotted
from lockstep.errors import UsageError

_WIDTH: Final = 120


@dataclass(frozen=True)
class Translated:
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


def expected(default: Any, value: Any) -> str:
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
    """Keys that are turned into ours one by one; `settings` has all that the other framework knows, dotted.

    Of `typed` ones, those that nothing is done with are an error of this code: none is passed over.
    """

    def __init__(self, settings: Mapping[str, Any], typed: Collection[str]) -> None:
        self._settings = settings
        self._typed = typed
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        self._left: dict[str, str] = {}
        self._notes: list[str] = []
        self._used: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key of theirs."""
        self._used.add(key)
        return self._settings[key]

    def __contains__(self, key: str) -> bool:
        """Whether a key of theirs has a value."""
        return key in self._settings

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of theirs that may not be there; UsageError where it is of another type."""
        value = self[key] if key in self._settings else None
        if value is None:
            return default
        if wanted := expected(default, value):
            raise UsageError(f"{key}: expected {wanted}, got {write.shown(value)}")
        return value

    def set(self, path: str, value: Any, origin: str) -> None:
        """Set a dotted key of ours; `origin` says what it follows from."""
        *sections, name = path.split(".")
        section = self._values
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
        self._origins[path] = origin
        if isinstance(value, dict):
            self._origins |= {f"{path}.{dotted(inner)}": origin for inner, _ in write.leaves(value)}

    def take(self, key: str, path: str) -> None:
        """Set a key of ours to the value of one of theirs."""
        self.set(path, self[key], key)

    def leave(self, reason: str, *keys: str) -> None:
        """Say why these keys of theirs have no counterpart, if somebody typed them and nothing follows from them.

        The first reason counts.
        """
        self._used.update(keys)
        self._left = dict.fromkeys(keys, reason) | self._left

    def below(self, *sections: str) -> list[str]:
        """Return all keys of these sections of theirs."""
        return [key for key in self._settings if key.partition(".")[0] in sections]

    def rest(self, reason: str) -> None:
        """Say why all keys have no counterpart that nothing was done with yet."""
        self.leave(reason, *(key for key in self._settings if key not in self._used))

    def note(self, text: str) -> None:
        """Say what else is not as it was there."""
        self._notes.append(text)

    def done(self) -> Translated:
        """Return the whole."""
        if forgotten := sorted(set(self._settings) - self._used):
            raise AssertionError(f"nothing was done with {', '.join(forgotten)}")
        mapped = {word.strip(",") for origin in self._origins.values() for word in origin.split()}
        left = {key: reason for key, reason in self._left.items() if key in self._typed and key not in mapped}
        return Translated(self._values, self._origins, left, tuple(self._notes))
