"""A scheduler of torch's in the own loop: its rates to the bit, on every placement, and after a resume."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loops
import pytest
import torch
import worlds
from loop_ends import ended
from test_joined import joined
from torch import nn
from torch.optim import lr_scheduler

from lockstep.errors import UsageError

STEPS = 6
Make = Callable[[torch.optim.Optimizer], Any]


def one_after_the_other(optimizer: torch.optim.Optimizer) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.CosineAnnealingLR(optimizer, 4)], [2])


SCHEDULERS: dict[str, Make] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.3),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3, 3], 0.3),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (3 + n)]),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.03], total_steps=9),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3),
    "SequentialLR": one_after_the_other,
}


def groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.SGD([{"params": [first], "lr": 0.07}, {"params": others}], lr=0.03, momentum=0.9)


def step(scheduler: Any, number: int) -> None:
    scheduler.step(*([1.0 + number % 2] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def train(run: Any, make: Make, last: int = STEPS) -> list[list[float]]:
    """Train up to the step `last`, and save there; return the rates that the engine's groups had."""
    model = loops.net()
    optimizer = groups(model)
    scheduler = make(optimizer)
    model, optimizer = run.place(model, optimizer, scheduler=scheduler)
    rates = []
    for each in loops.computed(run, model, steps=STEPS):
        each.update()
        rates.append([group["lr"] for group in run._placed.engine.groups])
        step(scheduler, each.number)
        if each.number == last:
            if run.dir is not None:
                run.save()
            break
    return rates


def plain(make: Make) -> list[list[float]]:
    """Return the rates of plain PyTorch."""
    optimizer = groups(loops.net())
    scheduler, rates = make(optimizer), []
    for number in range(1, STEPS + 1):
        optimizer.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
        step(scheduler, number)
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_are_those_of_plain_pytorch_and_a_resumed_run_goes_on_with_them(name: str, tmp_path: Path) -> None:
    make = SCHEDULERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with joined() as run:
            rates = train(run, make)
            whole = run.fingerprint()
        with joined(dir=tmp_path / "run") as run:
            train(run, make, 4)
        with joined(dir=tmp_path / "run") as run:
            assert train(run, make) == rates[4:]
            assert run.fingerprint() == whole
    assert rates == plain(make)
    assert rates[0] != rates[-1]


def test_settings_that_a_resume_overrules_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def made(decay: float) -> Make:
        return lambda optimizer: lr_scheduler.StepLR(optimizer, 1, decay)

    text = "run.place: the scheduler has a different gamma than at the start of the run"
    said, rates = [], []
    for last, decay in ((1, 0.5), (2, 0.5), (3, 0.9), (4, 0.9)):
        with joined(dir=tmp_path / "run") as run:
            rates += train(run, made(decay), last)
        said.append(text in capsys.readouterr().err)
    assert said == [False, False, True, True]
    assert rates == plain(made(0.5))[:4]


def loop(run: Any) -> None:
    train(run, SCHEDULERS["LambdaLR"])


def differing(run: Any) -> None:
    train(run, lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5 + run.rank / 10))


def in_other_modes(run: Any) -> None:
    model, _ = loops.placed(run)
    for each in loops.computed(run, model, epochs=1):
        each.update()
        model.train(run.rank == 0)


@pytest.mark.worlds
def test_every_placement_comes_to_the_same_bits_and_ranks_that_differ_are_refused() -> None:
    [alone] = worlds.run(1, ended, "single", loop)
    for size, strategy in ((2, "ddp"), (3, "zero1"), (2, "zero2"), (3, "zero3")):
        assert worlds.run(size, ended, strategy, loop) == [alone] * size
    for text in worlds.run(2, ended, "ddp", differing):
        assert text.startswith(
            "step.update: settings of group 0: rank 1 differs from rank 0: lr: 0.042, not 0.035 (tests/loop/"
        )
    for text in worlds.run(2, ended, "ddp", in_other_modes):
        assert text.startswith(
            "step.update: modules in evaluation mode: rank 1 differs from rank 0: "
            "the whole model, not none (tests/loop/"
        )


def saved_first(run: Any, scheduler: Any) -> None:
    run.save()
    scheduler.step()


def saved_before_a_setting(run: Any, scheduler: Any) -> None:
    run.save()
    scheduler.optimizer.param_groups[-1]["weight_decay"] = 0.5


def by_hand(run: Any, scheduler: Any) -> None:
    scheduler.optimizer.param_groups[0]["lr_scale"] = 0.5


REFUSED: dict[str, tuple[dict[str, float], Callable[[Any, Any], None]]] = {
    "step 1: got lr=0.1, but a scheduler sets the learning rate": ({"lr": 0.1}, lambda *_: None),
    "step 1: scheduler.step() was called after run.save": ({}, saved_first),
    "step 1: weight_decay of an optimizer group was changed after run.save": ({}, saved_before_a_setting),
    "lr_scale of an optimizer group was changed, but a scheduler sets its rate": ({}, by_hand),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_would_not_be_heeded_is_refused(text: str, tmp_path: Path) -> None:
    given, body = REFUSED[text]

    def trained(run: Any) -> None:
        model = loops.net()
        optimizer = groups(model)
        scheduler = lr_scheduler.StepLR(optimizer, 2)
        model, optimizer = run.place(model, optimizer, scheduler=scheduler)
        for each in run.steps(loops.data(), batch=16, microbatches=4, steps=2):
            for batch in each:
                each.backward(sum=loops.loss(model, batch))
            each.update(**given)
            body(run, scheduler)

    with pytest.raises(UsageError) as raised, joined(dir=tmp_path / "run") as run:
        trained(run)
    assert str(raised.value).startswith(text)
    assert "test_scheduler.py:" in str(raised.value)


class Warmup(lr_scheduler.LRScheduler):
    """As the much used ones that go over into another."""

    def __init__(self, optimizer: torch.optim.Optimizer, after: Any) -> None:
        self.after = after
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return self.after.get_last_lr()


def test_what_a_checkpoint_could_not_keep_is_refused() -> None:
    model = loops.net()
    optimizer = groups(model)
    for scheduler, text in (
        (
            Warmup(optimizer, lr_scheduler.StepLR(optimizer, 2)),
            r"a checkpoint cannot hold these values of the scheduler: after \(",
        ),
        (
            lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)), 2),
            "a scheduler is not supported with a tensor lr",
        ),
    ):
        with pytest.raises(UsageError, match=text), joined() as run:
            run.place(model, scheduler.optimizer, scheduler=scheduler)


def test_a_scheduler_that_is_none_of_this_optimizer_is_refused() -> None:
    model = loops.net()
    for scheduler, text in (
        (lr_scheduler.StepLR(groups(model), 2), "the scheduler belongs to a different optimizer"),
        (lambda step: 0.1, r"expected a scheduler of torch\.optim\.lr_scheduler, got a function \(.*\); pass one"),
    ):
        with pytest.raises(UsageError, match=text), joined() as run:
            run.place(model, groups(model), scheduler=scheduler)


def test_a_run_goes_on_with_the_scheduler_that_it_had(tmp_path: Path) -> None:
    with joined(dir=tmp_path / "run") as run:
        train(run, SCHEDULERS["MultiStepLR"], 2)
    for make, text in (
        (SCHEDULERS["StepLR"], r"scheduler: saved 'torch.*MultiStepLR', now 'torch.*StepLR'"),
        (lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 2, 3, 4]), "the scheduler has "),
    ):
        with pytest.raises(UsageError, match=text), joined(dir=tmp_path / "run") as run:
            train(run, make)


@pytest.mark.parametrize("steps_it", [True, False])
def test_a_scheduler_that_never_moves_is_warned_of(capsys: pytest.CaptureFixture[str], steps_it: bool) -> None:
    with joined() as run:
        model = loops.net()
        optimizer = groups(model)
        scheduler = lr_scheduler.StepLR(optimizer, 2)
        model, optimizer = run.place(model, optimizer, scheduler=scheduler)
        for step in loops.computed(run, model, epochs=4):
            step.update()
            if steps_it and step.every(epochs=2):
                scheduler.step()
    assert "".join(capsys.readouterr()).count("the script never stepped its scheduler") == (not steps_it)
