"""Loops as people write them, of written_loops.py: alike on all placements, or refused on all, with a line."""

import re
from collections.abc import Sequence

import pytest
import worlds
import written_loops
from loop_ends import Loop, ended, names
from written_loops import ALIKE, IN_ROWS, REFUSED

Place = tuple[int, str]

ALONE: Place = (1, "single")
PLACES: list[Place] = [(size, name) for name in ("ddp", "zero1", "zero2", "zero3") for size in (2, 3)]
ROWS = ("zero2", "zero3")
LOOPS = [*ALIKE, *REFUSED, *IN_ROWS]
# Each loop meets one placement, and the next loop the next one; what is refused in rows meets one of each kind.
FIRST = {name: [PLACES[number % len(PLACES)]] for number, name in enumerate(LOOPS)}
FIRST |= {name: [PLACES[number % 4], PLACES[4 + number % 4]] for number, name in enumerate(IN_ROWS)}
ELSEWHERE = pytest.mark.slow("the loop meets one of these placements above, and each of them several loops")


def outcomes(name: str, places: Sequence[Place]) -> dict[Place, str]:
    """Run a loop on these placements; by placement, what all its ranks came to."""
    table = {}
    for size, strategy in places:
        [table[size, strategy]] = {*worlds.run(size, ended, strategy, getattr(written_loops, name))}
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
    assert names(text, loop), text


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("name", LOOPS)
def test_a_written_loop_is_alike_or_refused_with_its_line(name: str) -> None:
    check(name, FIRST[name])


@pytest.mark.slow("several ranks")
@ELSEWHERE
@pytest.mark.worlds
@pytest.mark.parametrize("name", LOOPS)
def test_a_written_loop_is_alike_or_refused_with_its_line_everywhere(name: str) -> None:
    check(name, PLACES)


def test_each_placement_is_met_by_some_of_sixty_loops() -> None:
    assert {place for places in FIRST.values() for place in places} == {*PLACES}
    assert len({*LOOPS}) >= 60
