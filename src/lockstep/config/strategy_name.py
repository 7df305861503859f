"""Checks that a strategy exists, before the configuration is validated."""

from collections.abc import Iterator
from typing import Any

from lockstep.common.names import format_choices
from lockstep.config.document import Path
from lockstep.config.placement import ALIASES, FASTEST
from lockstep.config.write import format_value
from lockstep.strategies import list_strategy_names


def find_strategy_problems(name: Any) -> Iterator[tuple[Path, str]]:
    """Yield the path of a key and a message if there is no strategy named `name`."""
    valid = ["auto", FASTEST, *list_strategy_names(), *ALIASES]
    if isinstance(name, str) and ":" not in name and name not in valid:  # an import path is checked later
        text = f"no strategy {format_value(name)}{format_choices(name, valid)}"
        yield ("placement", "strategy", "name"), text
