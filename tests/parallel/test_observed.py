"""The task's sums over a step are the same wherever its micro-batches are computed, and change nothing else."""

from dataclasses import replace
from typing import Any

import pipeline_models
import pytest
import toys
import worlds
from toys import Case

from lockstep.comm.world import World

pytestmark = [pytest.mark.slow("several ranks"), pytest.mark.worlds]


def observed(world: World, case: Case) -> list[dict[str, Any]]:
    """Train some steps, of which every other is observed, and return the sums of each, and the last loss."""
    engine, found = toys.engine(world, case), []
    for step, *_ in toys.steps(case):
        sums = engine.forward_backward(toys.share(world, case, step), step, observe=step.number % 2 == 0)
        engine.update(toys.rate(step), case.clip)
        found.append({name: each.tolist() for name, each in sums.of_task.items()} | {"total": sums.total.item()})
    engine.close()
    return found


def test_sums_are_those_of_one_process() -> None:
    case = Case()
    [alone] = worlds.run(1, observed, case)
    counted = [each.get("counted") for each in alone]
    assert counted == [12, None, 7, None]
    for strategy, size, options in (
        *(("ddp", 2, ()), ("ddp", 3, ()), ("zero1", 2, ()), ("zero2", 4, ()), ("zero3", 3, ())),
        ("hsdp", 4, (("replicate", 2),)),
    ):
        placed = replace(case, strategy=strategy, options=options)
        assert worlds.run(size, observed, placed) == [alone] * size, (strategy, size)


@pytest.mark.parametrize(("size", "options"), [(2, {}), (3, {"recompute": True}), (4, {"replicate": 2})])
def test_a_pipeline_observes_too(size: int, options: dict[str, Any]) -> None:
    case = pipeline_models.recipe()
    [alone] = worlds.run(1, observed, case)
    assert alone[0]["counted"] == case.samples[0]
    assert worlds.run(size, observed, pipeline_models.in_pipeline(case, options)) == [alone] * size
