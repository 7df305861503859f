"""What a step took is that of the steps after the watched ones, and the most memory is that of the watched ones."""

import time
from types import SimpleNamespace
from typing import Final

import pytest
import torch

from lockstep.comm.world import World
from lockstep.common.rank import RankInfo
from lockstep.config.load import load
from lockstep.run.plan_accuracy import StepMeasurements, can_compare_with_plan
from lockstep.setup.resolved import resolve_config

MIB: Final = 2**20


ONE: Final = World(RankInfo(0, 1, 0, 1, "test"), torch.device("cpu"))


def test_time_is_that_of_the_steps_after_the_watched_ones() -> None:
    seconds = [0.0]
    grading = StepMeasurements(ONE, SimpleNamespace(get_split_seconds=lambda: seconds[0]))
    held = torch.ones(8 * MIB, dtype=torch.uint8)
    with grading.exclude():
        beside = torch.ones(32 * MIB, dtype=torch.uint8)
    for step in grading.measure_steps(iter(range(1, 9))):
        passing = torch.ones((0, 64, 4, 8, 16, 2, 1, 64, 64)[step] * MIB, dtype=torch.uint8)
        time.sleep(0.05)
        del passing
        seconds[0] += (0, 7.0, 9.0, 9.0, 9.0, 9.0, 9.0, 0.25, 0.75)[step]
    found = grading.get_result()
    assert found["step_s"] == 0.5
    assert found["peak_bytes"] == pytest.approx(held.nbytes + 16 * MIB, rel=0.05)
    assert beside.nbytes == 32 * MIB  # which is there still


def test_a_start_of_six_steps_has_none_to_measure() -> None:
    grading = StepMeasurements(ONE, SimpleNamespace(get_split_seconds=lambda: 1.0))
    assert [*grading.measure_steps(iter("abcdef"))] == [*"abcdef"]
    assert grading.get_result() == {}


@pytest.mark.parametrize(
    ("words", "graded"),
    [
        (["placement.processes=2"], True),
        (["placement.processes=4"], False),
        (["placement.processes=2", "placement.strategy=zero1"], False),
        (["placement.processes=2", "run.predicted="], False),
    ],
)
def test_only_the_placement_that_was_meant_is_graded(words: list[str], graded: bool) -> None:
    said = "run.predicted={strategy: ddp, processes: 2, step_s: 0.1, peak_bytes: 5000}"
    assert can_compare_with_plan(resolve_config(load("digits", ["placement.device=cpu", said, *words]))) is graded
