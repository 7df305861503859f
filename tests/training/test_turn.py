"""A step is counted once, at its first update; what went wrong in any of its updates stays."""

import math

import pytest
import torch

from lockstep.core.order import Step
from lockstep.parallel.engine import Sums, Update
from lockstep.training.progress import Progress
from lockstep.training.turn import TrainingStep

STEP = Step(number=4, epoch=1, first=8, samples=2, samples_seen=18, last_of_epoch=True)


def sums(loss: float) -> Sums:
    return Sums(torch.tensor(loss), 2, ())


def done(*updates: tuple[float, float, bool]) -> TrainingStep:
    """Return the step after updates: of each the rate, the loss, and whether it was applied."""
    turn = TrainingStep(STEP, [], Progress(step=4))
    for lr, loss, applied in updates:
        turn.record_update(lr, sums(loss), Update(torch.tensor(loss), applied))
    return turn


def test_a_step_with_two_updates_is_counted_once_at_its_first_rate() -> None:
    turn = done((0.5, 1.0, True), (0.25, 2.0, True))
    assert (turn.progress.step, turn.progress.samples, turn.progress.skipped_steps) == (5, 20, 0)
    assert turn.lr == 0.5
    assert turn.sums is not None
    assert turn.update is not None
    assert (turn.sums.total, turn.update.norm, turn.update.applied) == (2.0, 2.0, True)


@pytest.mark.parametrize("losses", [(math.nan, 2.0), (2.0, math.nan), (math.nan, math.nan)])
def test_a_loss_that_is_not_finite_stays_whichever_update_had_it(losses: tuple[float, float]) -> None:
    turn = done((0.5, losses[0], True), (0.5, losses[1], True))
    assert turn.sums is not None
    assert turn.sums.total.isnan()


@pytest.mark.parametrize("applied", [(False, True), (True, False), (False, False)])
def test_a_step_is_skipped_once_however_many_of_its_updates_are(applied: tuple[bool, bool]) -> None:
    turn = done((0.5, 1.0, applied[0]), (0.5, 1.0, applied[1]))
    assert turn.progress.skipped_steps == 1
    assert turn.update is not None
    assert not turn.update.applied
