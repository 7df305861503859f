"""The watch waits for the device only when asked, and names the first loss that is not finite."""

import math
import weakref

import pytest
import torch

from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.core.engine_recipe import PlainRecipe, make_nonfinite_advice
from lockstep.core.order import Steps
from lockstep.errors import TrainingError
from lockstep.parallel.engine import Sums
from lockstep.training.watch import NonFiniteCheck

STEPS = Steps(8, 2, epochs=3)


def _watch(losses: list[float], stop: bool = True) -> NonFiniteCheck:
    watch = NonFiniteCheck(World(ALONE, torch.device("cpu")), stop, "do so")
    for number, loss in enumerate(losses):
        total = torch.tensor(2 * loss, dtype=torch.float64)
        watch.add(STEPS[number], 0.1 * (number + 1), Sums(total, 2, [total]))
    return watch


def test_the_last_loss_is_kept_until_the_next() -> None:
    watch = _watch([3.0, 2.0])
    assert (watch.check(), watch.check()) == (2.0, 2.0)


def test_nothing_seen_is_no_loss() -> None:
    assert math.isnan(_watch([]).check())


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_the_first_that_is_not_finite_is_named(loss: float) -> None:
    watch = _watch([1.0, 1.0, 1.0, 1.0, loss, 1.0, math.nan])
    with pytest.raises(TrainingError) as caught:
        watch.check()
    assert str(caught.value) == (f"loss is {loss} at step 5 (epoch 2), on rank 0, at learning rate 0.5; do so")


def test_nobody_is_told_to_clip_who_does_or_to_change_the_recipe_of_a_loop() -> None:
    assert make_nonfinite_advice(PlainRecipe(1)).startswith(
        "lower the learning rate, set recipe.clip_norm, or skip such steps"
    )
    assert (
        make_nonfinite_advice(PlainRecipe(1, clip_norm=1.0))
        == "lower the learning rate, or skip such steps with recipe.nonfinite=skip"
    )
    assert make_nonfinite_advice(None) == (
        "lower the learning rate, clip with step.update(clip=...), or check the loss for log(0) and x/0"
    )


def test_a_recipe_that_skips_goes_on() -> None:
    assert _watch([math.nan, 4.0], stop=False).check() == 4.0


def test_what_was_checked_is_let_go() -> None:
    watch = _watch([])
    total = torch.ones((), dtype=torch.float64)
    alive = weakref.ref(total)
    watch.add(STEPS[0], 0.1, Sums(total, 2, [total]))
    del total
    assert alive() is not None
    watch.check()
    assert alive() is None
