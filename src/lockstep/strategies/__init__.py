"""The strategies. Each file defines a class `Strategy`, and the name of the file is the name of the strategy.

The exception is base.py, which defines the interface of a strategy. This file has no heavy imports, so that strategy
names can be checked without importing torch.
"""

import pkgutil
from typing import Final

ON_ONE_PROCESS: Final = ("data_parallel", "single")  # strategies that need exactly one process


def names() -> list[str]:
    """Return the names of all strategies."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")
