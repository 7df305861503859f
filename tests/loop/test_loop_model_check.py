"""Optimizers that run.place takes: of torch with a state from the start, and of the user's own."""

from pathlib import Path
from typing import Any

import loops
import pytest
import torch
import worlds
from loop_ends import ended
from test_joined import assert_resumes, joined
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

from lockstep.errors import UsageError


def with_adagrad(run: Any, last: int = 6) -> None:
    model = loops.net()
    groups = [{"params": model[0].parameters(), "lr": 0.3}, {"params": model[1:].parameters()}]
    optimizer = Adagrad(groups, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5)
    model, _ = run.place(model, optimizer)
    for step in loops.computed(run, model, epochs=2):
        step.update(clip=1.0)
        if step.number == last:
            break


@pytest.mark.worlds
def test_adagrad_has_the_same_bits_on_every_placement() -> None:
    alone = worlds.run(1, ended, "single", with_adagrad)
    assert len(alone[0]) == 64, alone
    for size, strategy in ((2, "ddp"), (2, "zero1"), (2, "zero2"), (3, "zero3")):
        assert worlds.run(size, ended, strategy, with_adagrad) == alone * size


def test_a_run_with_adagrad_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    assert_resumes(with_adagrad, tmp_path)


def test_adagrad_does_what_it_does_in_plain_pytorch() -> None:
    with joined() as run:
        model = nn.Linear(6, 3)
        plain = nn.Linear(6, 3)
        plain.load_state_dict(model.state_dict())
        model, _ = run.place(model, Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5))
        for step in run.steps(loops.data(), batch=40, microbatches=1, steps=3):
            for inputs, targets in step:
                step.backward(sum=loops.loss(model, (inputs, targets)))
            step.update()
        optimizer = Adagrad(plain.parameters(), lr=0.1, initial_accumulator_value=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            (loops.loss(plain, loops.data()[:]) / 40).backward()
            optimizer.step()
        torch.testing.assert_close(model.weight, plain.weight)


@pytest.mark.parametrize("stepped", [SGD, Adagrad])
def test_an_optimizer_that_has_stepped_is_refused(stepped: type[Optimizer]) -> None:
    model = nn.Linear(6, 3)
    optimizer = stepped(model.parameters(), lr=0.1, **({"momentum": 0.9} if stepped is SGD else {}))  # type: ignore[call-arg]
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    with pytest.raises(UsageError, match=r"run\.place: the optimizer has already taken steps"), joined() as run:
        run.place(model, optimizer)


class Own(Optimizer):
    """Steps by the gradient, times what `factor` returns."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0
        self.history: list[float] = []

    def factor(self, state: dict[str, Any]) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(each.grad * group["lr"] * self.factor(self.state[each]))


class Counting(Own):
    """Counts in itself, which no checkpoint holds."""

    def factor(self, state: dict[str, Any]) -> float:
        return 1 / self.steps


class CountingInAList(Own):
    """The same, in what its copies would share."""

    def factor(self, state: dict[str, Any]) -> float:
        self.history.append(1.0)
        return 1 / len(self.history)


class Drawing(Own):
    """Adds noise, as Langevin dynamics does."""

    def factor(self, state: dict[str, Any]) -> Tensor:
        return torch.rand(())


class Deaf(Own):
    """Does not heed its rate."""

    def factor(self, state: dict[str, Any]) -> float:
        return 1 / self.param_groups[0]["lr"]


class CountingInState(Own):
    """Counts where a checkpoint finds it."""

    def factor(self, state: dict[str, Any]) -> float:
        state["steps"] = state.get("steps", 0) + 1
        return 1 / float(state["steps"])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            Counting,
            "optimizer Counting: produces different weights when resumed from a checkpoint .*; keep all state in self",
        ),
        (CountingInAList, "optimizer CountingInAList: produces different weights when resumed"),
        (
            Drawing,
            "optimizer Drawing: two instances with the same inputs produced different weights .*; do not draw random",
        ),
        (Deaf, "optimizer Deaf: its step does not depend on the learning rate"),
    ],
)
def test_an_optimizer_that_no_checkpoint_holds_is_refused_as_in_a_recipe(kind: type[Own], text: str) -> None:
    model = loops.net()
    with pytest.raises(UsageError, match=text) as raised, joined() as run:
        run.place(model, kind(model.parameters()))
    assert "test_loop_model_check.py" in str(raised.value)


def with_own(run: Any, last: int = 6) -> None:
    model = loops.net()
    optimizer = CountingInState(model.parameters())
    model, _ = run.place(model, optimizer)
    assert (optimizer.steps, optimizer.history) == (0, [])  # no trial has changed it
    for step in loops.computed(run, model, epochs=2):
        step.update()
        if step.number == last:
            break


def test_an_optimizer_that_keeps_all_in_its_state_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    assert_resumes(with_own, tmp_path)
