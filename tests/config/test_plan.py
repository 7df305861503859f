"""Steps and rates from a recipe."""

import pytest

from lockstep.config.load import load
from lockstep.config.plan import compute_base_rate, compute_steps, count_warm_up_steps, format_base_rate, make_rate
from lockstep.errors import UsageError


def recipe(name, *overrides):
    return load(name, overrides).config.recipe


def test_the_linear_scaling_rule_is_said():
    assert format_base_rate(recipe("imagenet-resnet50")) == "0.2 = 0.1 x 256 / 128"
    assert compute_base_rate(recipe("imagenet-resnet50")) == 0.2
    assert format_base_rate(recipe("imagenet-resnet50", "recipe.optimizer.lr=0.3")) == "0.3"


def test_steps_of_epochs_and_of_a_number_of_steps():
    assert compute_steps(recipe("digits", "recipe.epochs=25"), 1437).total == 25 * 23
    assert compute_steps(recipe("digits", "recipe.epochs=", "recipe.steps=100"), 1437).total == 100


def test_dropping_the_last_batch_of_too_few_samples_leaves_nothing():
    small = recipe("digits", "recipe.last_batch=drop")
    assert compute_steps(small, 64).total_samples == 64 * small.epochs
    with pytest.raises(UsageError, match="63 training samples do not fill a batch of 64"):
        compute_steps(small, 63)


def test_the_rate_of_the_imagenet_recipes_is_the_published_one():
    chosen = recipe("imagenet-resnet50")
    run = compute_steps(chosen, 1_281_167)
    at = make_rate(chosen, run).compute_rate
    assert [f"{at(run[epoch * run.per_epoch].samples_seen):.6f}" for epoch in (0, 1, 5, 10, 50, 99)] == [
        "0.020000",
        "0.055986",
        "0.198769",
        "0.195106",
        "0.100000",
        "0.000049",
    ]


def test_a_run_of_steps_ends_its_curve_with_its_last_step():
    chosen = recipe("digits", "recipe.epochs=", "recipe.steps=30", "recipe.schedule.warmup_epochs=0")
    run = compute_steps(chosen, 1437)
    assert make_rate(chosen, run).compute_rate(run.total_samples) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize(("epochs", "each"), [(2, "step"), (0.5, "step"), (1.3, "step"), (0.5, "epoch"), (0, "epoch")])
def test_the_first_step_after_warm_up_is_the_first_at_the_full_rate(epochs, each):
    changes = ["recipe.schedule.name=constant", f"recipe.schedule.each={each}"]
    chosen = recipe("digits", f"recipe.schedule.warmup_epochs={epochs}", *changes)
    run = compute_steps(chosen, 1437)
    rates = [make_rate(chosen, run).compute_rate(run[number].samples_seen) for number in range(run.total)]
    full = compute_base_rate(chosen)
    assert count_warm_up_steps(chosen, run) == next(number for number, each in enumerate(rates) if each == full)


def test_a_warm_up_of_steps_rises_evenly_and_ends_with_them():
    flat = ["recipe.schedule.name=constant", "recipe.schedule.warmup_steps=100", "recipe.schedule.warmup_factor=0.01"]
    chosen = recipe("digits", *flat)
    run = compute_steps(chosen, 1408)  # 22 full batches
    base = compute_base_rate(chosen)
    seen = [run[number].samples_seen for number in (0, 1, 50, 99, 100, 101)]
    assert seen == [number * chosen.batch for number in (0, 1, 50, 99, 100, 101)]
    rates = [make_rate(chosen, run).compute_rate(samples) / base for samples in seen]
    assert rates == pytest.approx([0.01, 0.0199, 0.505, 0.9901, 1, 1])
    assert rates[-2:] == [1, 1]
    assert count_warm_up_steps(chosen, run) == 100


@pytest.mark.parametrize("last_batch", ["keep", "drop"])
@pytest.mark.parametrize("samples", [64, 65, 130, 200, 1437])
@pytest.mark.parametrize("warmup", [0, 1, 3, 10, 100])
def test_a_warm_up_of_steps_lasts_that_many_steps_if_epochs_end_with_a_short_batch(samples, warmup, last_batch):
    flat = ["recipe.schedule.name=constant", f"recipe.schedule.warmup_steps={warmup}", "recipe.epochs=200"]
    chosen = recipe("digits", *flat, f"recipe.last_batch={last_batch}")
    run = compute_steps(chosen, samples)
    rate = make_rate(chosen, run)
    rates = [rate.compute_rate(run[number].samples_seen) for number in range(warmup + 2)]
    base = compute_base_rate(chosen)
    assert [each == base for each in rates] == [False] * warmup + [True, True]
    assert rates[:warmup] == sorted(set(rates[:warmup]))
