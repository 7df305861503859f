"""A configuration of another framework, and what became of each of its keys."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from lockstep.config import write
from lockstep.config.document import dotted


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
        remarks = [f"# {write.printable(each)}" for each in self.remarks()]
        return "\n".join([f"# {write.printable(heading)}", *write.block(self.values, self.origins), *remarks]) + "\n"

    def remarks(self) -> Iterator[str]:
        """Yield what is left out, and what is not as it was there."""
        for key, reason in self.left.items():
            yield f"{key} is not mapped: {reason}"
        yield from self.notes


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
        """Say why these keys of theirs have no counterpart, if somebody typed them; the first reason counts."""
        self._used.update(keys)
        self._left = {key: reason for key in keys if key in self._typed} | self._left

    def below(self, *sections: str) -> list[str]:
        """Return all keys of these sections of theirs."""
        return [key for key in self._settings if key.partition(".")[0] in sections]

    def note(self, text: str) -> None:
        """Say what else is not as it was there."""
        self._notes.append(text)

    def done(self) -> Translated:
        """Return the whole."""
        if forgotten := sorted(set(self._settings) - self._used):
            raise AssertionError(f"nothing was done with {', '.join(forgotten)}")
        return Translated(self._values, self._origins, self._left, tuple(self._notes))
