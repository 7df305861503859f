"""Several updates in a step of the own loop, each of some groups of the optimizer: two nets against each other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import adversaries
import pytest
import torch
import worlds
from adversaries import gan, in_one_module, reached_by_each_loss, wasserstein
from loop_ends import ended
from test_joined import assert_resumes, joined
from torch import nn

from lockstep.errors import TrainingError, UsageError

Body = Callable[[Any], Any]


@pytest.mark.worlds
@pytest.mark.parametrize("body", [gan, wasserstein])
def test_every_placement_comes_to_the_same_bits(body: Body) -> None:
    [alone] = worlds.run(1, ended, "single", body)
    for size, strategy in ((2, "ddp"), (3, "ddp"), (3, "zero1")):
        assert worlds.run(size, ended, strategy, body) == [alone] * size


@pytest.mark.worlds
def test_one_module_is_the_same_in_rows_where_it_calls_what_it_has_equally_often() -> None:
    [alone] = worlds.run(1, ended, "single", in_one_module)
    assert worlds.run(2, ended, "zero2", in_one_module) == [alone] * 2
    for text in worlds.run(2, ended, "zero3", in_one_module):
        assert "is called more often than in the first forward" in text
        assert "let every loss depend on it (add 0 * output.sum() for a detached output)" in text


@pytest.mark.worlds
def test_one_module_whose_nets_each_loss_reaches_is_the_same_under_zero3() -> None:
    [alone] = worlds.run(1, ended, "single", reached_by_each_loss)
    assert worlds.run(2, ended, "zero3", reached_by_each_loss) == [alone] * 2


def differing_at_first(run: Any) -> None:
    model = adversaries.placed(run)
    for step in run.steps(adversaries.data(), batch=16, microbatches=4, epochs=2):
        once(step, model)
        step.update(lr=0.01 + run.rank / 100, of="critic")
        once(step, model)
        step.update(lr=0.01, of="generator")


@pytest.mark.worlds
def test_each_update_of_a_step_is_compared_between_the_ranks() -> None:
    for text in worlds.run(2, ended, "ddp", differing_at_first):
        assert text.startswith("step.update: lr: rank 1 differs from rank 0: 0.02, not 0.01 (tests/loop/")


def test_a_loss_that_is_not_finite_in_one_update_stays_seen() -> None:
    with pytest.raises(TrainingError, match="loss is inf at step 2"), joined() as run:
        not_finite(run)


def not_finite(run: Any) -> None:
    model = adversaries.placed(run)
    for step in run.steps(adversaries.data(), batch=16, microbatches=4, epochs=2):
        for (real,) in step:
            step.backward(sum=judged_twice(model, real) / (1.5 if step.number == 1 else 0))
        step.update(of="critic")
        for (real,) in step:
            step.backward(sum=judged_twice(model, real) / 2.5)  # another divisor than before, as each has its own
        step.update(of="generator")


def test_what_is_trained_outside_in_the_second_update_alone_is_refused() -> None:
    with pytest.raises(UsageError, match="a Linear outside the placed model"), joined() as run:
        outside(run)


def outside(run: Any) -> None:
    model, other = adversaries.nets(), nn.Linear(6, 6)
    model, _ = run.place(model, adversaries.adam(model))
    for step in run.steps(adversaries.data(), batch=16, microbatches=4, epochs=1):
        once(step, model)
        step.update(of="critic")
        for (real,) in step:
            step.backward(sum=judged_twice(model, other(real)))
        step.update(of="generator")


def test_a_run_that_was_left_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    assert_resumes(lambda run, last: gan(run, last=last), tmp_path)


def test_it_is_what_two_optimizers_do() -> None:
    """One micro-batch, and noise by the step: the sums then are those of plain PyTorch."""
    noises = [torch.randn(16, adversaries.NOISE, generator=torch.Generator().manual_seed(n)) for n in range(5)]
    with joined() as run:
        model = adversaries.nets()
        other = adversaries.nets()
        other.load_state_dict(model.state_dict())
        model, _ = run.place(model, adversaries.adam(model))
        of_critic, of_generator = (
            torch.optim.Adam(other[name].parameters(), lr=2e-2, betas=(0.5, 0.999)) for name in ("critic", "generator")
        )
        for step in run.steps(adversaries.data(), batch=16, microbatches=1, steps=4, drop_last=True):
            noise = noises[step.number]
            for (real,) in step:
                step.backward(sum=critic_loss(model, real, noise))
            step.update(of="critic")
            for _ in step:
                step.backward(sum=adversaries.judged(model, model["generator"](noise), real=True))
            step.update(of="generator")
            for optimizer, loss in ((of_critic, critic_loss), (of_generator, generator_loss)):
                other.zero_grad()
                (loss(other, real, noise) / 16).backward()
                optimizer.step()
        for name, each in model.state_dict().items():
            torch.testing.assert_close(each, other.state_dict()[name], rtol=1e-4, atol=1e-5)


def critic_loss(model: nn.ModuleDict, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    fake = model["generator"](noise).detach()
    return adversaries.judged(model, real, real=True) + adversaries.judged(model, fake, real=False)


def generator_loss(model: nn.ModuleDict, _: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return adversaries.judged(model, model["generator"](noise), real=True)


def once(step: Any, model: nn.ModuleDict) -> None:
    for (real,) in step:
        step.backward(sum=judged_twice(model, real))


def judged_twice(model: nn.ModuleDict, real: torch.Tensor) -> torch.Tensor:
    return adversaries.judged(model, real, real=True)


def unknown(step: Any, model: nn.ModuleDict) -> None:
    once(step, model)
    step.update(of="judge")


def second(step: Any, model: nn.ModuleDict) -> None:
    once(step, model)
    step.update(of="critic")
    step.update(of="generator")


def left_open(step: Any, model: nn.ModuleDict) -> None:
    once(step, model)
    step.update(of="critic")
    once(step, model)


def again(step: Any, model: nn.ModuleDict) -> None:
    once(step, model)
    step.update()
    once(step, model)


def all_groups(step: Any, model: nn.ModuleDict) -> None:
    once(step, model)
    step.update(of="critic")
    once(step, model)
    step.update()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (all_groups, "step 1: step.update without of= follows an update with of="),
        (unknown, "step.update: got of='judge', expected the name of an optimizer group: 'critic', 'generator'"),
        (second, "step 1: step.update was called twice"),
        (left_open, "step 1: the loop left the step without step.update"),
        (again, "step 1: its micro-batches are iterated over twice without step.update(of=...)"),
    ],
)
def test_what_is_no_phase_is_refused(body: Callable[[Any, nn.ModuleDict], None], text: str) -> None:
    refuses(body, text)


def test_an_average_of_which_nobody_knows_how_often_it_moves_is_refused() -> None:
    refuses(second, "step 1: step.update(of=...) is not supported with ema", ema=0.9)


def test_a_save_between_two_updates_is_refused(tmp_path: Path) -> None:
    text = r"step 1: its micro-batches are iterated over after run\.save .*test_own_phases\.py"
    with pytest.raises(UsageError, match=text), joined(dir=tmp_path / "run") as run:
        save_between(run)


def save_between(run: Any) -> None:
    model = adversaries.placed(run)
    for step in run.steps(adversaries.data(), batch=16, microbatches=4, epochs=1):
        once(step, model)
        step.update(of="critic")
        run.save()
        once(step, model)


def refuses(body: Callable[[Any, nn.ModuleDict], None], text: str, **given: float) -> None:
    def loop(run: Any) -> None:
        model = adversaries.placed(run, **given)
        for step in run.steps(adversaries.data(), batch=16, microbatches=4, epochs=1):
            body(step, model)

    with pytest.raises(UsageError) as raised, joined() as run:
        loop(run)
    assert str(raised.value).startswith(text)
    assert "test_own_phases.py:" in str(raised.value)
