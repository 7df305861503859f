"""Checks the name of a strategy before validation."""

from collections.abc import Iterator
from typing import Any, Final

from lockstep.common.names import choices
from lockstep.config.document import Path
from lockstep.config.placement import ALIASES, FASTEST
from lockstep.config.write import format_value
from lockstep.strategies import names

# Strategies of other frameworks that Lockstep doesn't have, with the advice for each.
_UNAVAILABLE: Final = {
    "data_parallel": (
        ": nn.DataParallel splits each micro-batch over the GPUs of one process, which has no effect on a CPU or on "
        "one GPU; use ddp with one process per GPU, or single"
    ),
}


def strategy_problems(name: Any) -> Iterator[tuple[Path, str]]:
    """Yield the path of the key and the problem if there is no strategy named `name`."""
    valid = ["auto", FASTEST, *names(), *ALIASES]
    if isinstance(name, str) and ":" not in name and name not in valid:  # import paths are checked later
        text = f"no strategy {format_value(name)}{_UNAVAILABLE.get(name) or choices(name, valid)}"
        yield ("placement", "strategy", "name"), text
