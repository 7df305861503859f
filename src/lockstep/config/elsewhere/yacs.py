"""Settings as yacs has them: a YAML file and `KEY VALUE` pairs over a table of all keys with their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.common.names import suggestion
from lockstep.config import write
from lockstep.config.document import Document, Place, Problem, dotted, locate, parse
from lockstep.config.elsewhere.translation import expected
from lockstep.errors import ConfigError, UsageError

_NOTHING = ("None", "none", "")


@dataclass(frozen=True)
class Given:
    """What somebody typed: dotted keys in capitals, and where each stands."""

    values: Mapping[str, Any]
    places: Mapping[str, Place]

    def renamed(self, names: Mapping[str, str]) -> Given:
        """Return it with the names of today in place of older ones."""
        values = {names.get(key, key): value for key, value in self.values.items()}
        return Given(values, {names.get(key, key): place for key, place in self.places.items()})

    def over(self, defaults: Mapping[str, Any], framework: str) -> dict[str, Any]:
        """Return all settings; ConfigError for keys that the framework does not know, and values of another type."""
        problems = []
        for key, value in self.values.items():
            path = tuple(key.split("."))
            if key not in defaults:
                text = f"{framework} has no such key{suggestion(key, defaults)}"
                problems.append(Problem(self.places[key], path, text))
            elif wanted := expected(defaults[key], value):
                problems.append(Problem(self.places[key], path, f"expected {wanted}, got {write.shown(value)}"))
        if problems:
            raise ConfigError([str(each) for each in problems])
        return {**defaults, **self.values}


def read(document: Document, words: Sequence[str]) -> Given:
    """Return the keys of a file's document, and of pairs `KEY VALUE`, of which the last one of a key counts."""
    if len(words) % 2:
        raise UsageError(f"{words[-1]}: a key without a value; they come as KEY VALUE, such as OPTIM.BASE_LR 0.1")
    if document.problems:
        raise ConfigError([str(each) for each in document.problems])
    values: dict[str, Any] = {}
    places: dict[str, Place] = {}
    for path, value in write.leaves(document.values):
        values[dotted(path)], places[dotted(path)] = value, locate(document.places, path)
    for key, text in zip(words[::2], words[1::2], strict=True):
        read_value = parse(text, "override")
        if read_value.problems:
            raise ConfigError([f"{each.place}  {key}: {each.text}" for each in read_value.problems])
        values[key] = None if text in _NOTHING else read_value.values
        places[key] = Place("override")
    return Given(values, places)
