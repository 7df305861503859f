"""The surface is frozen: configuration keys, commands, strategies and public names are those in surface.txt."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest
from component import script

import lockstep
from lockstep import cli
from lockstep.config.schema import Config
from lockstep.strategies import list_strategy_names

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


def advice(kind: str, there: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return what to do about each name that only one of both has."""
    there, known = {*there}, {*known}
    replace = f"replace one of the {kind}: delete it and its line in tests/surface.txt, and write this one there"
    mine = ", or keep it in your own code and name it by its import path" if kind == "strategies" else ""
    new = [f"{name} is new, and the surface is frozen; {replace}{mine}" for name in sorted(there - known)]
    return new + [f"{name} is gone; delete its line in tests/surface.txt" for name in sorted(known - there)]


def test_a_new_name_is_told_to_replace_one_and_one_that_is_gone_to_leave_the_list() -> None:
    assert advice("keys", "abc", "abc") == []
    new, gone = advice("keys", ["run.dir", "run.color"], ["run.dir", "run.old"])
    assert new.startswith("run.color is new, and the surface is frozen; replace one of the keys: delete it")
    assert gone == "run.old is gone; delete its line in tests/surface.txt"


@pytest.mark.parametrize("kind", ["keys", "commands", "strategies", "names"])
def test_it_has_what_is_listed_and_no_more(kind: str) -> None:
    there = {
        "keys": keys(),
        "commands": cli.main.list_commands(None),  # type: ignore[arg-type]
        "strategies": list_strategy_names(),
        "names": lockstep.__all__,
    }
    problems = advice(kind, there[kind], listed()[kind])
    assert not problems, "\n".join(problems)
