"""Locates the keys in the file that an error is about, if the error is raised while the model or data is built."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from lockstep.config.load import Loaded
from lockstep.errors import ConfigError, UsageError

# The beginnings of errors about the object that a section names.
_SUBJECTS: Final = {
    "model ": "recipe.model",
    "dataset ": "recipe.data",
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
    """Add a line `file:line:column  key` to a UsageError of the block for each key of the file that it is about."""
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
    """Return a line `file:line:column  key` for each key that `text` is about, at most six.

    If `text` names a section, or begins like an error about it, these are the keys below the section that appear as
    words in `text`, such as an option that a model doesn't accept. If there are no such keys, the line is for the
    `root` of the section, if you set it and the error isn't about an unknown dataset, or for its `name`. Defaults and
    overrides have no position in a file and are omitted.
    """
    text = re.split(r"\bvalid:", text, maxsplit=1, flags=re.IGNORECASE)[0]  # valid alternatives follow
    sections = [section for start, section in _SUBJECTS.items() if text.startswith(start)]
    keys: dict[str, None] = {}
    for mentioned in dict.fromkeys([*_KEY.findall(text), *sections]):
        keys_below = {key: re.escape(key.rpartition(".")[2]) for key in origins if key.startswith(f"{mentioned}.")}
        keys_below.pop(f"{mentioned}.name", None)  # "name" appears in many texts
        named_keys = [key for key, word in keys_below.items() if re.search(rf"(?<![\w.]){word}(?![\w.])", text)]
        keys |= dict.fromkeys([mentioned] if mentioned in origins else named_keys)
    if not keys:
        roots = [f"{section}.root" for section in sections if "no such dataset" not in text]
        root_keys = [key for key in roots if origins.get(key, "default") != "default"]
        keys = dict.fromkeys(root_keys or [f"{section}.name" for section in sections])
    key_origins = [(key, origins.get(key, "default")) for key in keys]
    return [f"{origin}  {key}" for key, origin in key_origins if origin not in ("default", "override")][:_MOST]
