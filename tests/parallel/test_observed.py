"""The task's sums over a step are the same wherever its micro-batches are computed, and change nothing else."""

from dataclasses import replace
from typing import Any

import pipeline_models
import pytest
import toys
import worlds
from toys import Case

from lockstep.comm.world import World
from lockstep.core.order import cut
from lockstep.strategies import pipeline
from lockstep.tasks.base import MicroBatch


def observed(world: World, case: Case) -> list[dict[str, Any]]:
    """Train some steps, of which every other is observed, and return the sums of each, and the last loss."""
    engine, found = toys.engine(world, case), []
    for step, *_ in toys.steps(case):
        sums = engine.forward_backward(toys.share(world, case, step), step, observe=step.number % 2 == 0)
        engine.update(toys.rate(step), case.clip)
        found.append({name: each.tolist() for name, each in sums.of_task.items()} | {"total": sums.total.item()})
    engine.close()
    return found


def observed_in_stages(world: World, case: pipeline_models.Case, options: dict[str, Any] | None) -> list[Any]:
    """Observe the first step of a pipeline."""
    engine = pipeline_models.engine(world, case, options)
    data_rank = pipeline.Strategy(**(options or {})).mesh(world.size).data_rank(world.rank)
    step, images, targets = next(iter(pipeline_models.steps(case)))
    cuts = cut(step.samples, case.microbatches)
    own = [
        MicroBatch(index, (images[list(cuts[index])], targets[list(cuts[index])]), len(cuts[index]), len(cuts[index]))
        for index, _ in data_rank.indices(len(cuts))
    ]
    sums = engine.forward_backward(own, step, observe=True).of_task
    engine.close()
    return [(name, each.tolist()) for name, each in sums.items()]


@pytest.mark.worlds
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


@pytest.mark.worlds
@pytest.mark.parametrize(("size", "options"), [(2, {}), (3, {"recompute": True}), (4, {"replicate": 2})])
def test_a_pipeline_observes_too(size: int, options: dict[str, Any]) -> None:
    case = pipeline_models.Case()
    [alone] = worlds.run(1, observed_in_stages, case, None)
    assert dict(alone)["counted"] == next(iter(case.samples))
    assert all(found == alone for found in worlds.run(size, observed_in_stages, case, options))
