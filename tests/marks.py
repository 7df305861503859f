"""The markers at the top of a test file, known without importing it, and the order in which files start."""

import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Final

import pytest

TESTS: Final = Path(__file__).parent
_OF_FILE: Final = re.compile(r"^pytestmark = (\[\n.*?\n\]|[^\n]*)", re.MULTILINE | re.DOTALL)
_MARK: Final = re.compile(r"\bpytest\.mark\.(\w+)")


@cache  # several hooks ask about the same few hundred files
def marks_of(path: Path) -> frozenset[str]:
    """Return the names of the markers that a file gives to all its tests by `pytestmark`."""
    found = _OF_FILE.search(path.read_text(encoding="utf-8")) if path.suffix == ".py" and path.is_file() else None
    return frozenset(_MARK.findall(found[1])) if found else frozenset()


def starts_a_cluster(path: Path) -> bool:
    """Say whether the tests of a file start clusters, hosts or other programs that cannot run twice at a time."""
    return "cluster" in marks_of(path)


def in_order(items: Iterable[pytest.Item], seconds_of: Callable[[str], float]) -> list[pytest.Item]:
    """Return tests in the order in which they should start: clusters first, then files by the seconds that they take.

    The tests of a file stay together, in their order.
    """
    return sorted(items, key=lambda item: (not starts_a_cluster(item.path), -seconds_of(item.path.name)))
