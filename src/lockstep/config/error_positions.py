"""Adds the file positions of the relevant configuration keys to errors that occur while building a model or dataset."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from lockstep.config.load import LoadedConfig
from lockstep.errors import ConfigError, UsageError

# Maps the prefix of an error message to the section that configures the object in the message.
_SECTIONS_BY_PREFIX: Final = {
    "model ": "recipe.model",
    "dataset ": "recipe.data",
    "optimizer ": "recipe.optimizer",
    "schedule ": "recipe.schedule",
    "metric ": "recipe.metrics",
    "loss": "recipe.loss",
    "strategy ": "placement.strategy",
}
_KEY: Final = re.compile(r"\b(?:recipe|placement|run)(?:\.\w+)+")
_MAX_LINES: Final = 6


@contextmanager
def add_key_positions(loaded: LoadedConfig) -> Iterator[None]:
    """Append the positions of relevant keys to a UsageError that is raised in the `with` block."""
    try:
        yield
    except ConfigError:
        raise
    except UsageError as error:
        lines = find_key_positions(str(error), loaded.origins)
        if not lines:
            raise
        raise UsageError("\n".join([str(error), *lines])) from error


def find_key_positions(message: str, origins: Mapping[str, str]) -> list[str]:
    """Return at most six lines `file:line:column  key` with the positions of the keys that an error message is about.

    The message mentions a section, or starts with a prefix that identifies one. The relevant keys are the keys of this
    section that appear as words in the message, such as an option that a model doesn't accept. If no key appears, the
    relevant key is `root` if the user set it and the dataset is known, and `name` otherwise. Default values and
    overrides are omitted, because they have no position in a file.
    """
    # Ignore the list of valid alternatives.
    message = re.split(r"\bvalid:", message, maxsplit=1, flags=re.IGNORECASE)[0]
    sections = [section for prefix, section in _SECTIONS_BY_PREFIX.items() if message.startswith(prefix)]
    keys: dict[str, None] = {}
    for mentioned in dict.fromkeys([*_KEY.findall(message), *sections]):
        keys_below = {key: re.escape(key.rpartition(".")[2]) for key in origins if key.startswith(f"{mentioned}.")}
        keys_below.pop(f"{mentioned}.name", None)  # many messages contain the word "name" in a different sense
        named_keys = [key for key, word in keys_below.items() if re.search(rf"(?<![\w.]){word}(?![\w.])", message)]
        keys |= dict.fromkeys([mentioned] if mentioned in origins else named_keys)
    if not keys:
        roots = [f"{section}.root" for section in sections if "no such dataset" not in message]
        root_keys = [key for key in roots if origins.get(key, "default") != "default"]
        keys = dict.fromkeys(root_keys or [f"{section}.name" for section in sections])
    key_origins = [(key, origins.get(key, "default")) for key in keys]
    return [f"{origin}  {key}" for key, origin in key_origins if origin not in ("default", "override")][:_MAX_LINES]
