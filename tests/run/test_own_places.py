"""What one rank alone does between two steps of an own loop is refused, and figures that are one rank's are named."""

import io
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from typing import Any

import loops
import pytest
import worlds
from loop_ends import ended
from torch import nn

from lockstep.comm.world import World

CALLS: dict[str, Callable[[Any, nn.Module], object]] = {
    "place": lambda run, _: loops.placed(run),
    "steps": lambda run, _: run.steps(loops.data(), batch=16, steps=9),
    "each": lambda run, _: [*run.each(loops.data())],
    "sum": lambda run, model: run.sum(loops.loss(model, batch) for batch in run.each(loops.data())),
    "save": lambda run, _: run.save(),
    "fingerprint": lambda run, _: run.fingerprint(),
    "close": lambda run, _: run.close(),
}


def trained(run: Any, after: Callable[[Any], object] = int) -> nn.Module:
    model, _ = loops.placed(run)
    for step in run.steps(loops.data(), batch=16, microbatches=4, epochs=1):
        hits = 0
        for inputs, targets in step:
            hits += int((model(inputs).argmax(1) == targets).sum())
            step.backward(loops.loss(model, (inputs, targets)))
        step.update()
        after(hits)
    return model


def by_rank_0(run: Any, name: str) -> None:
    model = trained(run)
    if run.rank == 0:
        CALLS[name](run, model)
    elif name == "fingerprint":
        run.close()


def by_rank_0_alone(world: World, name: str) -> str:
    return ended(world, "ddp", partial(by_rank_0, name=name))


@pytest.mark.worlds
@pytest.mark.parametrize("name", [*CALLS])
def test_what_rank_0_alone_calls_is_refused_with_its_line(name: str) -> None:
    found, *others = worlds.run(3, by_rank_0_alone, name)
    what = "the end of the run" if name == "close" else f"run.{name}"
    others_at = "the end of the run" if name == "fingerprint" else "run.fingerprint"
    assert re.match(rf"{what}: rank [12] is at {others_at} instead \(tests/\S+:\d+\); let every", found)
    assert {each.partition(" (")[0] for each in others} == {f"{others_at}: rank 0 is at {what} instead"}


def logging(world: World, all_ranks: bool) -> str:
    def loop(run: Any) -> None:
        def log(hits: int) -> None:
            run.log(size=run.size)
            if all_ranks or run.rank == 0:
                run.log(hits=hits)

        trained(run, log)

    with redirect_stderr(io.StringIO()) as printed:
        ended(world, "ddp", loop)
    return printed.getvalue()


@pytest.mark.worlds
def test_figures_that_each_rank_added_up_itself_are_warned_of_once() -> None:
    found, *others = worlds.run(2, logging, True)
    assert found.count("warning: run.log: size, hits: ranks gave other figures, and those of rank 0 are written: ") == 1
    assert others == [""]
    assert worlds.run(1, logging, True) == [""]
