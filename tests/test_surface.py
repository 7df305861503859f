"""The surface is frozen: configuration keys, commands, strategies and public names are those in surface.txt.

A new one replaces one, or is a decision of the maintainers: see CONTRIBUTING.md.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from component import script

import lockstep
from lockstep import cli
from lockstep.config.schema import Config
from lockstep.strategies import names

LISTED: Final = Path(__file__).with_name("surface.txt")


def listed() -> dict[str, list[str]]:
    """Return what the file lists under each heading."""
    found: dict[str, list[str]] = {}
    for line in LISTED.read_text(encoding="utf-8").splitlines():
        if line.endswith(":"):
            found[line[:-1]] = []
        elif line.strip():
            found[next(reversed(found))].append(line.strip())
    return found


def keys() -> Iterator[str]:
    table = script("configuration-table")
    for section in Config.model_fields:
        yield from (key.path for key in table._keys(section))


@pytest.mark.parametrize("kind", ["keys", "commands", "strategies", "names"])
def test_it_has_what_is_listed_and_no_more(kind: str) -> None:
    there = {
        "keys": keys(),
        "commands": cli.main.list_commands(None),  # type: ignore[arg-type]
        "strategies": names(),
        "names": lockstep.__all__,
    }
    assert sorted(there[kind]) == listed()[kind], "the surface is frozen: see CONTRIBUTING.md"
