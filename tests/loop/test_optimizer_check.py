"""An optimizer of the script's own trains nothing with the samples of one rank, and whatever it likes between steps."""

from collections.abc import Callable
from threading import Thread
from typing import Any, ClassVar

import loops
import pytest
import torch
import worlds
from loop_ends import ended, names
from one_process import joined
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lockstep.errors import UsageError


class Plain(torch.optim.Optimizer):
    """An optimizer as users write it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor.data -= group["lr"] * tensor.grad


class Temperature:
    """A tensor such as SAC trains beside its model, and its optimizer."""

    kind: ClassVar[Any] = torch.optim.Adam

    def __init__(self, kind: Any = torch.optim.Adam) -> None:
        self.log = torch.zeros((), requires_grad=True)
        self.optimizer = kind([self.log], lr=0.1)

    def descend(self, entropy: Tensor) -> None:
        self.backward(entropy)
        self.step()

    def backward(self, entropy: Tensor) -> None:
        (self.log.exp() * (entropy - 0.5)).backward()

    def step(self) -> None:
        self.optimizer.step()  # <-
        self.optimizer.zero_grad()


def entropies(outputs: Tensor) -> Tensor:
    return -(outputs.softmax(1) * outputs.log_softmax(1)).sum(1)


def idle(*_: Any) -> None:
    pass


def trained(
    run: Any,
    *,
    within: Callable[[Tensor], object] = idle,
    before: Callable[[], object] = idle,
    after: Callable[[Any], object] = idle,
    microbatches: int = 4,
    factor: Callable[[], Tensor] = lambda: torch.tensor(1.0),
) -> nn.Module:
    model, _ = loops.placed(run)
    for step in run.steps(loops.data(), batch=16, microbatches=microbatches, epochs=1):
        for x, y in step:
            outputs = model(x)
            entropy = entropies(outputs)
            step.sum(entropy=entropy.detach().sum())
            step.backward(sum=F.cross_entropy(outputs, y, reduction="sum") - (factor() * entropy).sum())
            within(entropy.detach())
        before()
        step.update()
        after(step)
    return model


@pytest.mark.parametrize("kind", [torch.optim.Adam, Plain])
def test_a_tensor_that_each_micro_batch_trains_is_refused_in_the_second(kind: Any) -> None:
    temperature = Temperature(kind)
    said = rf"^step 1: {kind.__name__}\.step\(\) trains a tensor of shape \[\] outside the placed model within the step"
    with pytest.raises(UsageError, match=said) as refusal, joined() as run:
        trained(run, within=lambda entropy: temperature.descend(entropy.mean()))
    assert names(str(refusal.value), Temperature.step)
    assert "make it an nn.Parameter of the model that you pass to run.place" in str(refusal.value)


def test_a_tensor_that_is_trained_before_the_update_is_refused_in_the_second_step() -> None:
    for microbatches in (1, 4):
        temperature = Temperature()
        with pytest.raises(UsageError, match=r"^step 2: Adam\.step\(\) trains a tensor"), joined() as run:
            trained(
                run,
                within=lambda entropy: temperature.backward(entropy.mean()),  # noqa: B023
                before=temperature.step,
                microbatches=microbatches,
            )


def test_gradients_from_micro_batches_for_a_step_after_the_update_are_refused() -> None:
    temperature = Temperature()
    with (
        pytest.raises(UsageError, match=r"^step 2: a backward within the step, .* tensor of shape \[\]"),
        joined() as run,
    ):
        trained(
            run,
            within=lambda entropy: temperature.backward(entropy.mean()),
            after=lambda _: temperature.step(),
        )


def between_steps(run: Any) -> None:
    temperature = Temperature()
    schedule = torch.optim.lr_scheduler.ExponentialLR(temperature.optimizer, 0.9)

    def after(step: Any) -> None:
        temperature.descend(step.sums["entropy"] / step.samples)
        schedule.step()

    trained(run, after=after, factor=lambda: temperature.log.exp().detach())
    assert float(temperature.log.detach())


@pytest.mark.worlds
def test_a_tensor_that_is_trained_between_steps_is_the_same_on_all_ranks() -> None:
    [alone] = worlds.run(1, ended, "single", between_steps)
    for strategy in ("ddp", "zero1"):
        assert worlds.run(2, ended, strategy, between_steps) == [alone] * 2


def each_rank_alone(run: Any) -> None:
    temperature = Temperature()
    trained(run, within=lambda entropy: temperature.descend(entropy.mean()))


@pytest.mark.worlds
def test_ranks_that_would_train_a_tensor_apart_are_refused() -> None:
    for text in worlds.run(2, ended, "ddp", each_rank_alone):
        assert text.startswith("step 1: Adam.step() trains a tensor of shape [] outside the placed model")


def perturbed(entropy: Tensor) -> Tensor:
    """Return what some steps of an optimizer make of a tensor of this micro-batch."""
    noise = torch.zeros_like(entropy, requires_grad=True)
    optimizer = torch.optim.Adam([noise], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (noise - entropy).square().sum().backward()
        optimizer.step()
    return noise.detach()


def test_a_tensor_of_one_micro_batch_or_batch_may_be_trained_in_it() -> None:
    with joined() as run:
        model = trained(run, within=perturbed)
        run.sum(count(model, x) for x, _ in run.each(loops.data(), batch=8))


def count(model: nn.Module, x: Tensor) -> int:
    with torch.enable_grad():
        return len(perturbed(model(x).detach().sum(1)))


def evaluated(run: Any, temperature: Temperature) -> None:
    model = trained(run)
    for x, _ in run.each(loops.data(), batch=8):
        with torch.enable_grad():
            temperature.descend(entropies(model(x).detach()).mean())


def test_a_tensor_that_batches_of_an_evaluation_train_is_refused() -> None:
    temperature = Temperature()
    said = r"^Adam\.step\(\) trains a tensor of shape \[\] outside the placed model within a batch of run\.each"
    with pytest.raises(UsageError, match=said), joined() as run:
        evaluated(run, temperature)


@pytest.mark.parametrize("fails", [False, True])
def test_optimizers_are_free_again_after_the_run(fails: bool) -> None:
    temperature, before = Temperature(), {**_global_optimizer_pre_hooks}

    def after(_step: Any) -> None:
        temperature.descend(torch.tensor(1.0))
        if fails:
            raise ZeroDivisionError

    try:
        with joined() as run:
            trained(run, after=after)
            assert len(_global_optimizer_pre_hooks) == len(before) + 1
    except ZeroDivisionError:
        assert fails
    assert {**_global_optimizer_pre_hooks} == before
    assert not temperature.log._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    with joined() as run:  # a second run of a notebook checks for itself
        trained(run, after=lambda _: temperature.descend(torch.tensor(1.0)))


def test_an_optimizer_of_another_thread_is_left_alone_such_as_that_of_an_asynchronous_server() -> None:
    temperature = Temperature()

    def within(entropy: Tensor) -> None:
        thread = Thread(target=temperature.descend, args=(entropy.mean(),))
        thread.start()
        thread.join()

    with joined() as run:
        trained(run, within=within)
