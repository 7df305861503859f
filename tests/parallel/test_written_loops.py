"""Loops as people write them, tests/run/written_loops.py: alike on all placements, or refused on all, with a line."""

import inspect
import re
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import worlds
import written_loops
from written_loops import ALIKE, IN_ROWS, REFUSED, Loop

from lockstep.comm.world import World
from lockstep.core import random
from lockstep.data.items import seed_generators
from lockstep.errors import UsageError
from lockstep.run.joined import Run
from lockstep.run.membership import Member
from lockstep.run.own_settings import settings
from lockstep.run.rank import Rank

Place = tuple[int, str]

ALONE: Place = (1, "single")
PLACES: list[Place] = [(size, name) for name in ("ddp", "zero1", "zero2", "zero3") for size in (2, 3)]
ROWS = ("zero2", "zero3")
LOOPS = [*ALIKE, *REFUSED, *IN_ROWS]
# Each loop meets one placement, and the next loop the next one; what is refused in rows meets one of each kind.
IN_GATE = {name: [PLACES[number % len(PLACES)]] for number, name in enumerate(LOOPS)}
IN_GATE |= {name: [PLACES[number % 4], PLACES[4 + number % 4]] for number, name in enumerate(IN_ROWS)}
EXTENDED = pytest.mark.extended("in the gate each loop meets one of these placements, and each of them several loops")


def ended(world: World, strategy: str, name: str) -> str:
    """Run a loop as a rank of `world`; return what it was refused with, or the hash of what it trained."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    given = settings(3, None, "fp32", 1, None, None)
    life: Any = SimpleNamespace(status=None)
    ends: list[BaseException | None] = []
    held = ExitStack()
    held.push(lambda _kind, error, _trace: ends.append(error) or True)
    run = Run(Member(given, life, Rank(life, world, None, {}, {}), None, held, strategy))
    seed_generators(random.key(random.INITIAL, 3))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as that a scheduler stepped before an optimizer
            getattr(written_loops, name)(run)
        found = run.fingerprint()
        run.close()
        return found
    except Exception as error:
        run.close(error)
        [end] = ends
        if not isinstance(end, UsageError):
            raise
        return str(end)
    finally:
        torch.use_deterministic_algorithms(deterministic)


def outcomes(name: str, places: Sequence[Place]) -> dict[Place, str]:
    """Run a loop on these placements; by placement, what all its ranks came to."""
    table = {}
    for size, strategy in places:
        [table[size, strategy]] = {*worlds.run(size, ended, strategy, name)}
    return table


def check(name: str, places: Sequence[Place]) -> None:
    """Compare a loop on these placements with one process."""
    alone = outcomes(name, [ALONE])[ALONE]
    if name not in REFUSED:
        assert re.fullmatch("[0-9a-f]{64}", alone), alone
    for (size, strategy), text in {ALONE: alone, **outcomes(name, places)}.items():
        if name in REFUSED:
            check_refused(*REFUSED[name], text)
        elif name in IN_ROWS and strategy in ROWS:
            check_refused(*IN_ROWS[name], text)
        else:
            assert text == alone, (size, strategy)


def check_refused(loop: Loop, said: str, text: str) -> None:
    assert any(part in text for part in said.split("|")), text
    lines, first = inspect.getsourcelines(loop)
    [marked] = [first + number for number, line in enumerate(lines) if line.rstrip().endswith("# <-")]
    if found := re.search(r"between \S+:(\d+) and \S+:(\d+)\)", text):
        begin, end = map(int, found.groups())
        assert begin <= marked <= end or not first < begin <= end, text  # or around the end of a loop
    elif found := re.search(r"since \S+:(\d+)\)", text):  # once around the loop
        assert first < int(found[1]) < first + len(lines), text
    else:
        assert f"written_loops.py:{marked})" in text


@pytest.mark.worlds
@pytest.mark.parametrize("name", LOOPS)
def test_a_written_loop_is_alike_or_refused_with_its_line(name: str) -> None:
    check(name, IN_GATE[name])


@EXTENDED
@pytest.mark.worlds
@pytest.mark.parametrize("name", LOOPS)
def test_a_written_loop_is_alike_or_refused_with_its_line_everywhere(name: str) -> None:
    check(name, PLACES)


def test_the_gate_has_each_placement_and_sixty_loops() -> None:
    assert {place for places in IN_GATE.values() for place in places} == {*PLACES}
    assert len({*LOOPS}) >= 60
