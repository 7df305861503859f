"""Where in the file stand the keys that a later error is about: one that only building the model or data finds."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from lockstep.config.load import Loaded
from lockstep.errors import ConfigError, UsageError

# How errors begin that are about what a section names.
_SUBJECTS: Final = {
    "model ": "recipe.model",
    "data set ": "recipe.data",
    "optimizer ": "recipe.optimizer",
    "schedule ": "recipe.schedule",
    "metric ": "recipe.metrics",
    "loss": "recipe.loss",
    "strategy ": "placement.strategy",
}
_KEY: Final = re.compile(r"\b(?:recipe|placement|run)(?:\.\w+)+")
_MOST: Final = 6


@contextmanager
def with_places(loaded: Loaded) -> Iterator[None]:
    """Add to a UsageError that the block raises a line `file:line:column  key` for each key of the file it is about."""
    try:
        yield
    except ConfigError:
        raise
    except UsageError as error:
        lines = places(str(error), loaded.origins)
        if not lines:
            raise
        raise UsageError("\n".join([str(error), *lines])) from error


def places(text: str, origins: Mapping[str, str]) -> list[str]:
    """Return where the keys were set that `text` names, or names the section of; those of overrides are left out.

    Of a section these are the keys whose own names are words of the text, such as an option that a model does not
    take; where there is none, it is what the section names, or where that lies.
    """
    text = re.split(r"\bvalid:", text, maxsplit=1, flags=re.IGNORECASE)[0]  # what could be given instead
    sections = [section for start, section in _SUBJECTS.items() if text.startswith(start)]
    found: dict[str, None] = {}
    for named in dict.fromkeys([*_KEY.findall(text), *sections]):
        below = {key: re.escape(key.rpartition(".")[2]) for key in origins if key.startswith(f"{named}.")}
        below.pop(f"{named}.name", None)  # a word of many texts
        inside = [key for key, word in below.items() if re.search(rf"(?<![\w.]){word}(?![\w.])", text)]
        found |= dict.fromkeys([named] if named in origins else inside)
    if not found:
        told = [f"{section}.root" for section in sections if "no such data set" not in text]
        given = [key for key in told if origins.get(key, "default") != "default"]
        found = dict.fromkeys(given or [f"{section}.name" for section in sections])
    here = [(key, origins.get(key, "default")) for key in found]
    return [f"{origin}  {key}" for key, origin in here if origin not in ("default", "override")][:_MOST]
