"""The benchmark of the loop runs, with the contestants that need no other framework."""

import pytest
import torch

from benchmarks import own_loop_parts
from benchmarks.loop import EXACT, HAND, OURS, OWN, measure

pytestmark = pytest.mark.slow("other programs, or minutes")


@pytest.mark.worlds
def test_hand_written_and_ours_take_turns() -> None:
    results = measure([HAND, EXACT, OURS, OWN], steps=40, turns=3)
    assert [result.unit for result in results] == ["us a step", "CPU us a step"]
    for result in results:
        assert [(row.name, len(row.turns)) for row in result.rows] == [(each, 3) for each in (HAND, EXACT, OURS, OWN)]
        assert all(1.0 < us < 1e6 for row in result.rows for us in row.turns)


@pytest.mark.worlds
def test_every_part_of_a_step_of_an_own_loop_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        own_loop_parts.main(steps=20, turns=2)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    lines = capsys.readouterr().out.splitlines()
    for label, _, _ in own_loop_parts._PARTS:
        line = next(line for line in lines if line.endswith(label))
        assert float(line.rpartition(" times ")[0].split()[-1]) > 0, line
