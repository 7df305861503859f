"""What is wrong with the name of a strategy, as a user typed it."""

from collections.abc import Iterator
from typing import Any, Final

from lockstep.common.names import choices
from lockstep.config.document import Path
from lockstep.config.placement import ALIASES, FASTEST
from lockstep.config.write import format_value
from lockstep.strategies import names

# What others have, and nothing here stands for.
_NOT_OFFERED: Final = {
    "data_parallel": (
        ": nn.DataParallel spreads each micro-batch over the GPUs of one process, and on a CPU or one GPU has nothing "
        "to spread over; use ddp with a process for each GPU, or single"
    ),
}


def strategy_problems(name: Any) -> Iterator[tuple[Path, str]]:
    """Yield what is wrong with the name of a strategy, as a problem of its key."""
    valid = ["auto", FASTEST, *names(), *ALIASES]
    if isinstance(name, str) and ":" not in name and name not in valid:  # an import path is followed later
        text = f"no strategy {format_value(name)}{_NOT_OFFERED.get(name) or choices(name, valid)}"
        yield ("placement", "strategy", "name"), text
