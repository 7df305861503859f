"""Words of a command line that may be files or overrides, told apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_OVERRIDE: Final = re.compile(r"(recipe|placement|run)(\.\w+)*=")


def apart(words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the overrides, such as `placement.device=cpu`, and the other words, each in their order."""
    overrides = tuple(each for each in words if _OVERRIDE.match(each))
    return overrides, [each for each in words if each not in overrides]
