"""A stall that ends a run is the failure of the rank that the others wait for."""

from types import SimpleNamespace
from typing import Any

import torch

from lockstep.config.placement import Placement
from lockstep.ranks.failure import Failure
from lockstep.ranks.stall import ThreadState, late_ranks
from lockstep.ranks.status import RankStatus
from lockstep.run.stall_detection import stall_detector


def _at(step: int, waits: bool | None) -> tuple[str, ThreadState]:
    return "host", ThreadState(RankStatus("training", step), ("lockstep/x.py:1 f",), waits)


def test_the_late_ranks_are_silent_or_compute_or_are_behind() -> None:
    assert late_ranks({0: _at(3, False), 1: _at(3, True), 2: _at(3, True)}, 3) == [0]
    assert late_ranks({0: _at(3, True), 1: _at(3, True)}, 3) == [2]
    assert late_ranks({0: _at(3, None), 1: _at(2, None)}, 2) == [1]
    assert late_ranks({0: _at(3, True), 1: _at(3, True)}, 2) == []


def test_the_failure_names_the_late_rank_and_not_the_one_that_reports_it() -> None:
    ended: list[Failure] = []
    log = SimpleNamespace(host="b", log=None, notice=None)
    rendezvous: Any = SimpleNamespace(
        info=SimpleNamespace(rank=1, size=2),
        rank_log=log,
        hosts=("a", "b"),
        timing=None,
        end=ended.append,
        store=None,
    )
    detector = stall_detector(rendezvous, Placement(on_stall="end"), torch.device("cpu"))
    detector.late = [0]
    detector.tell("stalled: rank 1 has waited 2 s for other ranks\n  rank 0 (a) is late: in step 8")
    [failure] = ended
    assert (failure.rank, failure.host) == (0, "a")
    assert failure.first_line == "stalled: rank 1 has waited 2 s for rank 0"
