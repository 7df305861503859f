"""What the times that ranks wait must be beside each other."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from waiting import QUICK

from lockstep.common import follow_parent
from lockstep.launchers import hosts
from lockstep.ranks.timing import TIMING, Timing

SRC = Path(__file__).parents[2] / "src/lockstep"


@pytest.mark.parametrize("timing", [TIMING, QUICK], ids=["production", "tests"])
def test_times_fit_together(timing: Timing) -> None:
    assert all(getattr(timing, each.name) > 0 for each in fields(timing))
    # Ranks that still read at the store poll some times while rank 0 stays; leaving takes all of that, and then ends.
    assert timing.first_poll_s <= timing.longest_poll_s < timing.report_missing_s <= timing.report_missing_rank_0_s
    assert 10 * timing.longest_poll_s <= timing.linger_s < timing.leave_timeout_s
    assert timing.report_timeout_s + timing.leave_timeout_s < timing.end_timeout_s
    # The others of a rank that refuses may come while it waits, and it is not taken for one of an earlier start.
    assert timing.early_failure_wait_s < TIMING.late_timeout_s
    # Whole beats; a failure that the main thread can notice by itself is left to it.
    assert timing.silent_s == pytest.approx(timing.max_missed_beats * timing.beat_s)
    assert timing.max_missed_beats >= 2
    assert timing.beat_s + timing.longest_poll_s < timing.notice_timeout_s
    assert timing.oom_window_s > timing.silent_s + timing.beat_s  # a kill is still news once its rank is given up
    # The rank that failed first has time to be seen to end before the others, which lost it, are believed.
    assert timing.watch_s < timing.first_failure_wait_s
    # A question is seen several times over before its answers are counted.
    assert timing.answer_poll_s < timing.sample_s <= timing.answer_timeout_s / 4


def test_the_command_that_holds_several_hosts_waits_longer_than_each_of_them() -> None:
    assert follow_parent.STOP_S < hosts.STOP_TIMEOUT_S


def test_seconds_of_ranks_are_in_one_place() -> None:
    constants = re.compile(r"^\w*(?:_S|PATIENCE|GRACE|MISSED)\b.* = [\d.]+", re.MULTILINE)
    assert not [file.name for file in (SRC / "ranks").glob("*.py") if constants.search(file.read_text("utf-8"))]
