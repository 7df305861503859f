"""The built-in strategies. Each module defines a class `Strategy`, and is named after the strategy.

The exception is base.py, which defines the interface of a strategy. This file doesn't import torch, so that strategy
names can be checked quickly.
"""

import pkgutil
from typing import Final

SINGLE_PROCESS_STRATEGIES: Final = ("data_parallel", "single")  # strategies that need exactly one process


def list_strategy_names() -> list[str]:
    """Return the names of all strategies."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")
