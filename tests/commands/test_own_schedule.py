"""A schedule by import path: its rates, and what is wrong with one told before a run with its line."""

import math
import re
from pathlib import Path

import own_schedules
import pytest

from lockstep.common.user_code import format_location
from lockstep.config.load import load
from lockstep.config.plan import compute_steps
from lockstep.core.rate import RateSchedule
from lockstep.errors import UsageError
from lockstep.setup.schedule import check_rate, find_rate

pytestmark = pytest.mark.slow("runs whole commands")

FILE = own_schedules.__file__


def rate(*words: str) -> RateSchedule:
    recipe = load("digits", ["recipe.epochs=2", *words]).config.recipe
    run = compute_steps(recipe, 1000)
    check_rate(recipe, run)
    return find_rate(recipe, run)


def test_the_factor_is_of_the_base_rate_at_the_samples_seen() -> None:
    words = ("recipe.schedule={name: 'own_schedules:one_cycle', options: {peak: 0.5}}", "recipe.optimizer.lr=0.4")
    found = rate(*words)
    assert [found.compute_rate(samples) for samples in (0, 500, 1000, 1500, 2000)] == pytest.approx(
        [0, 0.2, 0.4, 0.2, 0]
    )


def test_warm_up_the_least_rate_and_epochs_apply_to_it() -> None:
    words = (
        "recipe.schedule={name: 'own_schedules:one_cycle', options: {peak: 0.5}, min_lr: 0.1, each: epoch, "
        "warmup_epochs: 2, warmup_factor: 0.5}",
        "recipe.optimizer.lr=0.4",
    )
    found = rate(*words)
    assert [found.compute_rate(samples) for samples in (0, 999, 1000)] == pytest.approx([0.05, 0.05, 0.3])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gone", r"schedule own_schedules:gone: returned nan at epoch 1\.\d+ of 2; return a finite number, 0 or more"),
        ("negative", r"returned -0\.\d+ at epoch 0\.\d+ of 2; return a finite"),
        ("words", "returned str at epoch 0 of 2; return a finite number"),
        ("counts", r"a different rate when called again for step \d+; compute it only from the arguments"),
        ("draws", "returned a different rate when called again"),
        ("number", "schedule own_schedules:number: expected a function"),
        ("cycle", "has no 'cycle'"),
    ],
)
def test_what_is_no_schedule_is_refused(name: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        rate(f"recipe.schedule=own_schedules:{name}")


def test_what_it_raises_has_its_line() -> None:
    line = next(number for number, text in enumerate(Path(FILE).read_text().splitlines(), 1) if "1 / (epoch" in text)
    told = f"schedule own_schedules:divides: ZeroDivisionError: float division by zero ({format_location(FILE, line)})"
    with pytest.raises(UsageError, match=re.escape(told)):
        rate("recipe.schedule=own_schedules:divides")


def test_curves_of_ours_take_no_options() -> None:
    with pytest.raises(UsageError, match="options: only supported for a custom schedule, not for cosine"):
        load("digits", ["recipe.schedule={name: cosine, options: {peak: 1}}"])


def test_a_rate_that_fails_later_names_the_epoch() -> None:
    recipe = load("digits", ["recipe.schedule=own_schedules:gone", "recipe.epochs=2"]).config.recipe
    found = find_rate(recipe, compute_steps(recipe, 1000))
    assert math.isfinite(found.compute_rate(0))
    with pytest.raises(UsageError, match="returned nan at epoch 2 of 2"):
        found.compute_rate(2000)
