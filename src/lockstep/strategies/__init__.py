"""The strategies a user can name: one file each, whose name is the strategy's and whose class is `Strategy`.

A strategy is a frozen dataclass. Its fields are its options; `exactness` says whether its numbers are those of one
process to the bit, `cuts_rows` whether its optimizer sees but rows of tensors, `cuts_model` whether it computes a part
of the model on each rank, which its `check_model` then looks at, `recomputes` whether it has a recompute of its own.
`check` refuses what it cannot do before anything starts, `place` says which micro-batches a rank takes, and
`start` gives the engine.
This file imports nothing heavy, so that names can be checked without torch.
"""

from __future__ import annotations

import pkgutil


def names() -> list[str]:
    """Return the names of all strategies."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
