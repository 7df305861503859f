"""Which placements are measured: strategies that need one process are on one."""

import pytest

from lockstep.comparison import plan
from lockstep.config.load import load
from lockstep.config.placement import StrategyConfig
from lockstep.planning.survey import _iterate_placements
from lockstep.verification.custom_loop import _list_placements as list_placements_of_loop


def pairs(*names: str) -> list[tuple[str, int]]:
    found = _iterate_placements(load("digits", []), [StrategyConfig(name=name) for name in names], [1, 2, 3])
    return [(strategy.name, processes) for strategy, processes in found]


def test_replicas_are_measured_on_one_process_if_they_are_named() -> None:
    assert pairs("ddp", "data_parallel") == [("single", 1), ("data_parallel", 1), ("ddp", 2), ("ddp", 3)]
    assert "data_parallel" not in dict(pairs())
    assert {"ddp", "zero3"} <= {name for name, _ in pairs()}


@pytest.mark.parametrize("processes", [(1, 2), (2,)])
def test_they_are_verified_and_compared_on_one_process(processes: tuple[int, ...]) -> None:
    single = [("single", 1)] if 1 in processes else []
    assert list_placements_of_loop(processes, ("ddp", "data_parallel")) == [*single, ("data_parallel", 1), ("ddp", 2)]
    assert list(plan._list_process_counts({"name": "data_parallel"}, processes)) == [1]
    assert list(plan._list_process_counts({"name": "ddp"}, processes)) == [2]
