"""What is trained beside the placed model is refused, also where it first appears after some steps."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import loops
import pytest
import torch
import worlds
from loop_ends import ended
from one_process import joined
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import UsageError
from lockstep.loop.model import StrayModuleCheck

Loss = Callable[[nn.Module, int, Tensor, Tensor], Tensor]

LATE = 12  # a step in which checks are not repeated, unless a loss has a new form
REPEATED = 65  # the first one after it in which they are


def trained(loss: Loss, steps: int = REPEATED + 3, after: Callable[[nn.Module], object] = lambda _: None) -> None:
    with joined() as run:
        model = loops.net()
        model, _ = run.place(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        for step in run.steps(loops.data(), batch=16, microbatches=4, steps=steps):
            for x, y in step:
                step.backward(sum=loss(model, step.number, x, y))
            step.update()
            after(model)


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def deep(loss: Tensor) -> Tensor:
    """Give a loss the same last operations, whatever is below them."""
    return loss.sqrt().sqrt().square().square()


def joining(of: Any, since: int) -> Loss:
    def loss(model: nn.Module, number: int, x: Tensor, y: Tensor) -> Tensor:
        outputs = model(x)
        loss = summed(outputs, y)
        return loss if number < since else loss + of(outputs).square().sum()

    return loss


@pytest.mark.parametrize("since", [2, 3, 9])
def test_a_module_that_joins_in_one_of_the_first_steps_is_refused(since: int) -> None:
    with pytest.raises(UsageError, match=r"^a Linear outside the placed model has parameters"):
        trained(joining(nn.Linear(3, 2), since))


def test_a_module_that_joins_later_is_refused_by_the_new_form_of_the_loss() -> None:
    with pytest.raises(UsageError, match=rf"^step {LATE}: the loss depends on a parameter of shape \[2"):
        trained(joining(nn.Linear(3, 2), LATE))


def test_a_parameter_that_joins_in_a_loss_of_the_same_form_is_refused_when_checks_are_repeated() -> None:
    weight = nn.Parameter(torch.ones(3))

    def loss(model: nn.Module, number: int, x: Tensor, y: Tensor) -> Tensor:
        outputs = model(x)
        return deep(summed(outputs * weight if number >= LATE else outputs, y))

    with pytest.raises(UsageError, match=rf"^step {REPEATED}: the loss depends on a parameter of shape \[3\]"):
        trained(loss)
    trained(loss, steps=REPEATED - 1)


@pytest.mark.parametrize("since", [5, LATE])
def test_a_teacher_in_training_that_joins_late_is_refused(since: int) -> None:
    """Its statistics are no part of a loss; but the loss has a new form, so the next step checks modules."""
    teacher = loops.net()
    steps = []

    def loss(model: nn.Module, number: int, x: Tensor, y: Tensor) -> Tensor:
        steps.append(number)
        outputs = model(x)
        if number < since:
            return summed(outputs, y)
        with torch.no_grad():
            soft = teacher(x).softmax(1)
        return summed(outputs, y) + (outputs.softmax(1) - soft).square().sum()

    with pytest.raises(
        UsageError,
        match=r"^a BatchNorm1d outside the placed model .* in a momentum copy .* set its track_running_stats to False",
    ):
        trained(loss)
    assert steps[-1] == (since if since < 9 else since + 1)


def momentum_copy(run: Any) -> None:
    """Train against the targets of an average of the model, in training mode, as BYOL and MoCo do."""
    model, _ = loops.placed(run)
    average = deepcopy(model).requires_grad_(False)
    for module in average.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.track_running_stats = False
    for step in run.steps(loops.data(), batch=16, microbatches=4, epochs=2):
        for x, y in step:
            with torch.no_grad():
                targets = average(x)
            step.backward(sum=summed(model(x), y) + F.mse_loss(model(x), targets, reduction="sum"))
        step.update()
        with torch.no_grad():
            for own, trained in zip(average.parameters(), model.parameters(), strict=True):
                own.lerp_(trained, 0.1)


@pytest.mark.worlds
def test_a_momentum_copy_may_normalize_without_running_statistics() -> None:
    [alone] = worlds.run(1, ended, "single", momentum_copy)
    assert worlds.run(3, ended, "ddp", momentum_copy) == [alone] * 3


def test_a_frozen_teacher_may_join_at_any_time() -> None:
    teacher = loops.net().eval().requires_grad_(False)
    for since in (2, 9, LATE):
        trained(joining(lambda outputs: outputs - teacher(torch.ones(1, 6)), since))


def test_modules_are_refused_in_the_second_update_of_a_late_step_too() -> None:
    with pytest.raises(UsageError, match=r"^a Linear outside the placed model has parameters"), joined() as run:
        trained_in_turns(run, nn.Linear(3, 3))


def trained_in_turns(run: Any, other: nn.Module) -> None:
    model = loops.net()
    groups = [{"params": model[:2].parameters(), "name": "a"}, {"params": model[2:].parameters(), "name": "b"}]
    model, _ = run.place(model, torch.optim.SGD(groups, lr=1e-3))
    for step in run.steps(loops.data(), batch=16, microbatches=4, steps=REPEATED + 3):
        for name in ("a", "b"):
            for x, y in step:
                outputs = model(x)
                strays = step.number == REPEATED and name == "b"
                step.backward(sum=deep(summed(other(outputs) if strays else outputs, y)))
            step.update(of=name)


def test_a_layer_that_is_copied_from_the_model_is_outside_of_it() -> None:
    copies: list[nn.Module] = []

    def loss(model: nn.Module, number: int, x: Tensor, y: Tensor) -> Tensor:
        return summed(copies[0](model[:4](x)) if copies else model(x), y)

    with pytest.raises(UsageError, match=r"^a Linear outside the placed model has parameters"):
        trained(loss, after=lambda model: copies.append(deepcopy(model[4])))


def modify(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(0.1)


@pytest.mark.parametrize("modifies", [True, False])
def test_a_tensor_is_refused_once_it_is_modified_between_steps(modifies: bool) -> None:
    factor = torch.ones(3, requires_grad=True)

    def loss(model: nn.Module, number: int, x: Tensor, y: Tensor) -> Tensor:
        return summed(model(x) * factor, y)

    if not modifies:
        trained(loss)
        assert factor.grad is not None
        return
    text = r"^step 2: the loss depends on a tensor of shape \[3\] that requires a gradient, was modified since"
    with pytest.raises(UsageError, match=text):
        trained(loss, after=lambda _: modify(factor))


def test_inputs_that_are_made_and_modified_in_a_microbatch_are_taken() -> None:
    def loss(model: nn.Module, number: int, x: Tensor, y: Tensor) -> Tensor:
        noise = torch.zeros_like(x, requires_grad=True)
        [gradient] = torch.autograd.grad(summed(model(x + noise), y), noise)
        with torch.no_grad():
            noise.add_(0.1 * gradient.sign())
        penalized = x.requires_grad_()
        [slope] = torch.autograd.grad(model(penalized).sum(), penalized, create_graph=True)
        return summed(model(x + noise), y) + slope.square().sum()

    trained(loss)


def test_a_tensor_that_is_gone_is_not_kept() -> None:
    check = StrayModuleCheck(nn.Linear(2, 2))
    factor = torch.ones(2, requires_grad=True)
    check.check_loss(1, factor.sum())
    assert len(check._versions) == 1
    del factor
    assert not check._versions
