"""The strategies a user can name: one file each, whose name is the strategy's and whose class is `Strategy`.

What one has to have is written in base.py, which alone is none. This file imports nothing heavy, so that names can be
checked without torch.
"""

import pkgutil


def names() -> list[str]:
    """Return the names of all strategies."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")
