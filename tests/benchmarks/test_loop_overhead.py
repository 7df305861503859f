"""The benchmark of the loop runs, with the contestants that need no other framework."""

import pytest

from benchmarks.loop import EXACT, HAND, OURS, OWN, measure

pytestmark = pytest.mark.slow("other programs, or minutes")


@pytest.mark.worlds
def test_hand_written_and_ours_take_turns() -> None:
    results = measure([HAND, EXACT, OURS, OWN], steps=40, turns=3)
    assert [result.unit for result in results] == ["us a step", "CPU us a step"]
    for result in results:
        assert [(row.name, len(row.turns)) for row in result.rows] == [(each, 3) for each in (HAND, EXACT, OURS, OWN)]
        assert all(1.0 < us < 1e6 for row in result.rows for us in row.turns)
