"""What one rank alone does between two steps of an own loop is refused, and figures that are one rank's are named."""

import io
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from typing import Any

import loops
import numpy
import pytest
import torch
import torch.distributed as dist
import worlds
from loop_ends import ended
from torch import nn

from lockstep.comm.world import World

pytestmark = pytest.mark.worlds
CALLS: dict[str, Callable[[Any, nn.Module], object]] = {
    "place": lambda run, _: loops.placed(run),
    "steps": lambda run, _: run.steps(loops.data(), batch=16, microbatches=4, steps=9),
    "each": lambda run, _: [*run.each(loops.data())],
    "sum": lambda run, model: run.sum(loops.loss(model, batch) for batch in run.each(loops.data())),
    "save": lambda run, _: run.save(),
    "fingerprint": lambda run, _: run.fingerprint(),
    "close": lambda run, _: (run.close(), run.fingerprint()),  # of a process that went on, which a run's does not
}


def trained(run: Any, after: Callable[[Any, Any], object] = lambda step, hits: None, **given: Any) -> nn.Module:
    model, _ = loops.placed(run)
    for step in loops.steps(run):
        hits = 0
        for inputs, targets in step:
            hits += int((model(inputs).argmax(1) == targets).sum())
            step.backward(sum=loops.loss(model, (inputs, targets)))
        step.update(clip=given.get("clip"))
        after(step, hits)
    return model


def after_the_loop(run: Any, name: str) -> None:
    model = trained(run)
    if run.rank == 0:
        CALLS[name](run, model)
    elif name == "fingerprint":
        run.close()


def within_the_loop(run: Any, name: str) -> None:
    def after(step: Any, _hits: int) -> None:
        if run.rank == 0 and step.every(epochs=1):  # the last step: others wait for nobody after it
            CALLS[name](run, run._model)

    trained(run, after)


def by_rank_0_alone(world: World, loop: Callable[[Any, str], None], name: str) -> str:
    return ended(world, "ddp", partial(loop, name=name))


@pytest.mark.parametrize("name", [*CALLS])
def test_what_rank_0_alone_calls_is_refused_with_its_line(name: str) -> None:
    what = {"close": "the end of the run", "sum": "run.each"}.get(name, f"run.{name}")
    at = "the end of the run" if name == "fingerprint" else "run.fingerprint"
    found, *others = worlds.run(3, by_rank_0_alone, after_the_loop, name)
    line = r" \(tests/\S+:\d+\)"  # of this rank, next to its own call
    assert re.match(rf"{what}{line}: rank [12] is at {at} instead; call the same methods of run", found)
    for other in others:
        assert re.match(rf"{at}{line}: rank 0 is at {what} instead; ", other)
    found, *others = worlds.run(3, by_rank_0_alone, within_the_loop, name)
    assert re.match(rf"{what}{line}: rank [12] is at the loop over run.steps instead; ", found)
    assert {each.partition("; ")[0] for each in others} == {"rank 0 did not start its next step when this rank did"}


def clipped_apart(run: Any) -> None:
    trained(run, clip=numpy.float32(1 + run.rank) if run.rank else None)
    run.close()


def clipped_by_tensors(run: Any) -> None:
    trained(run, clip=torch.tensor(1.5))


def test_updates_that_differ_in_the_last_step_alone_are_refused_at_the_end() -> None:
    [found] = {*worlds.run(2, ended, "ddp", clipped_apart)}
    assert found.startswith(
        "step.update: clip: rank 1 differs from rank 0: 2.0, not null (tests/loop/test_own_places.py:"
    )
    assert worlds.run(2, ended, "ddp", clipped_by_tensors) == worlds.run(1, ended, "single", clipped_by_tensors) * 2


def logging(run: Any, all_ranks: bool) -> None:
    def log(_step: Any, hits: int) -> None:
        run.log(size=run.size)
        if all_ranks or run.rank == 0:
            run.log(hits=hits)

    trained(run, log)


def logged(world: World, all_ranks: bool) -> str:
    with redirect_stderr(io.StringIO()) as printed:
        ended(world, "ddp", partial(logging, all_ranks=all_ranks))
    return printed.getvalue()


def test_figures_that_each_rank_added_up_itself_are_warned_of_once() -> None:
    found, *others = worlds.run(2, logged, True)
    assert found.count("warning: run.log: hits: values differ between ranks, and only those of rank 0 are written") == 1
    assert others == [""]
    assert worlds.run(2, logged, False) == [""] * 2
    assert worlds.run(1, logged, True) == [""]


def evaluated(run: Any, add_up: Callable[[list[int]], object]) -> None:
    model = trained(run)
    for _ in range(2):
        add_up([int((model(inputs).argmax(1) == targets).sum()) for inputs, targets in run.each(loops.data())])


def warned_in_evaluation(world: World, by: str) -> str:
    def loop(run: Any) -> None:
        ways = {"itself": sum, "run": run.sum, "torch": lambda hits: dist.all_reduce(torch.tensor(sum(hits)))}
        evaluated(run, ways[by])

    with redirect_stderr(io.StringIO()) as printed:
        ended(world, "ddp", loop)
    return printed.getvalue()


def test_an_evaluation_that_no_rank_adds_up_with_others_is_warned_of_once() -> None:
    found, *others = worlds.run(2, warned_in_evaluation, "itself")
    assert found.count("warning: run.each: the results were not summed over ranks, so what rank 0 prints") == 1
    assert others == [""]
    assert worlds.run(1, warned_in_evaluation, "itself") == [""]
    assert [worlds.run(2, warned_in_evaluation, by) for by in ("run", "torch")] == [[""] * 2] * 2


def written_past_torch(run: Any) -> None:
    trained(run)[0].bias.detach().numpy()[0] += run.rank


def test_weights_that_are_a_ranks_own_have_no_fingerprint() -> None:
    [found] = {*worlds.run(2, ended, "ddp", written_past_torch)}
    assert re.match(
        r"the SHA-256 of the weights: rank 1 differs from rank 0: .*; let only the optimizer change weights", found
    )


def evaluations_side_by_side(run: Any) -> None:
    trained(run)
    for _ in zip(run.each(loops.data()), run.each(loops.data()), strict=True):
        ...


def saved_within_an_evaluation(run: Any) -> None:
    trained(run)
    for _ in run.each(loops.data()):
        run.save()


@pytest.mark.parametrize(("loop", "what"), [(evaluations_side_by_side, "each"), (saved_within_an_evaluation, "save")])
def test_what_is_called_within_an_evaluation_is_refused(loop: Callable[[Any], None], what: str) -> None:
    [found] = worlds.run(1, ended, "single", loop)
    assert found.startswith(f"run.{what}: called within a loop over run.each (tests/loop/test_own_places.py:")
