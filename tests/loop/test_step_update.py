"""The update of a step of an own loop: the numbers that it takes, and that no broken step is saved."""

import math
from pathlib import Path
from typing import Any

import loops
import pytest
import torch
import worlds
from loop_ends import ended
from test_joined import joined
from torch import Tensor

from lockstep.errors import TrainingError, UsageError


def updated(run: Any, **update: Any) -> None:
    model, _ = loops.placed(run)
    for step in loops.computed(run, model, steps=1):
        step.update(**update)


@pytest.mark.parametrize(
    ("update", "text"),
    [
        ({"clip": -1.0}, r"step 1: got clip=-1\.0 \(\S+:\d+\); pass a norm above 0, or remove clip="),
        ({"clip": 0}, "step 1: got clip=0"),
        ({"clip": math.nan}, "step 1: got clip=nan"),
        ({"clip": "max"}, "step 1: got clip='max'"),
        ({"lr": -0.1}, r"step 1: got lr=-0\.1 \(\S+:\d+\); pass a finite learning rate of at least 0"),
        ({"lr": math.inf}, "step 1: got lr=inf"),
        ({"lr": math.nan}, "step 1: got lr=nan"),
        ({"lr": torch.ones(2)}, "step 1: got lr=tensor"),
    ],
)
def test_an_update_that_goes_uphill_or_nowhere_is_refused(update: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text), joined() as run:
        updated(run, **update)


def test_a_rate_of_zero_and_a_norm_without_a_bound_are_taken() -> None:
    with joined() as run:
        updated(run, lr=0, clip=math.inf)


def broken(run: Any, kind: str) -> None:
    """Save after each of three steps, of which the second has a loss, or a gradient alone, that is nan."""

    def more(outputs: Tensor) -> Tensor:
        return outputs.sum() * math.nan if kind == "loss" else (outputs.sum() * 0).sqrt()

    model, _ = loops.placed(run)
    for step in loops.steps(run):
        for inputs, targets in step:
            loss = loops.loss(model, (inputs, targets))
            step.backward(sum=loss + more(model(inputs)) if step.number == 2 else loss)
        step.update()
        run.save()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("loss", r"loss is nan at step 2 .*; lower the learning rate, clip"),
        (
            "gradient",
            r"0\.weight \(and \d more\) is not finite after step 2, so nothing was saved; lower the learning rate",
        ),
    ],
)
def test_a_step_that_is_not_finite_is_not_saved(tmp_path: Path, kind: str, text: str) -> None:
    with pytest.raises(TrainingError, match=text), joined(dir=tmp_path / "run") as run:
        broken(run, kind)
    saved = sorted(each.name for each in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000001"]


def rows_checked(world: Any, strategy: str) -> str:
    """Break one row of a weight, and check on all ranks."""

    def loop(run: Any) -> None:
        model, _ = loops.placed(run)
        for step in loops.steps(run):
            for inputs, targets in step:
                step.backward(sum=loops.loss(model, (inputs, targets)) + (model(inputs)[:, 2].sum() * 0).sqrt())
            step.update()
            break
        try:
            run._placed.check_finite(1)
        except TrainingError as error:
            raise UsageError(str(error)) from None

    return ended(world, strategy, loop)


@pytest.mark.worlds
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_weights_that_are_not_finite_on_one_rank_are_found_on_all(strategy: str) -> None:
    for text in worlds.run(2, rows_checked, strategy):
        assert "is not finite after step 1" in text
