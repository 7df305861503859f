"""Loops as people write them: under all strategies alike refused with their line, or of one hash."""

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import loops
import pytest
import torch
import worlds
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from lockstep.comm.world import World
from lockstep.core import random
from lockstep.data.items import seed_generators
from lockstep.errors import UsageError
from lockstep.run.joined import Run
from lockstep.run.membership import Member
from lockstep.run.own_settings import settings
from lockstep.run.rank import Rank

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
Loop = Callable[[Any, Any, Any], None]


def own(run: Any) -> Iterator[Any]:
    found: Iterator[Any] = run.steps(loops.data(), batch=16, microbatches=4, epochs=1)
    return found


def whole(run: Any, model: nn.Module, after: Callable[[Any], None] = lambda step: None, **update: Any) -> None:
    """Train by steps that are as they should be, with `after` after each."""
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
        step.update(**update)
        after(step)


# What is refused. The mark is in the line that the message has to name, or that is between the two that it names.


def scaled_gradient(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
        for each in model.parameters():
            if each.grad is not None:
                each.grad.mul_(0.5)  # <-
        step.update()


def clipped_by_hand(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <-
        step.update()


def clipped_by_value_of_the_optimizer(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
        nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 0.1)  # <-
        step.update()


def clamped_through_data(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
        for each in model.parameters():
            each.grad.data.clamp_(-1, 1)  # <-
        step.update()


def clipped_in_each_microbatch(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <-
        step.update()


def gradient_set(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
        model[0].bias.grad = torch.zeros_like(model[0].bias)  # <-
        step.update()


def gradients_removed(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
            model.zero_grad()  # <-
        step.update()


def zero_grad_of_the_optimizer(run, model, optimizer):
    for step in own(run):
        optimizer.zero_grad(set_to_none=True)  # <-
        for batch in step:
            step.backward(loops.loss(model, batch))
        step.update()


def own_backward(run, model, optimizer):
    for step in own(run):
        for batch in step:
            loss = loops.loss(model, batch)
            loss.backward(retain_graph=True)  # <-
            step.backward(loss)
        step.update()


def own_backward_later(run, model, optimizer):
    for step in own(run):
        for batch in step:
            loss = loops.loss(model, batch)
            if step.number == 2:
                loss.backward(retain_graph=True)  # <-
            step.backward(loss)
        step.update()


def data_set(run, model, optimizer):
    def after(step):
        model[0].weight.data = model[0].weight.data * 0.5  # <-

    whole(run, model, after)


def written_through_data(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
        step.update()
        for each in model.parameters():
            each.data.clamp_(-0.01, 0.01)  # <-


def weights_clipped(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
        step.update()
        with torch.no_grad():
            for each in model.parameters():
                each.clamp_(-0.01, 0.01)  # <-


def old_parameters_written(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
        step.update()
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].mul_(2)  # <-


def average_copied_in(run, model, optimizer):
    average = {name: each.detach().clone() for name, each in model.state_dict().items()}
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
        step.update()
        model.load_state_dict(average)  # <-


def replaced(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
        step.update()
        model[0].weight = nn.Parameter(torch.zeros(13, 6))  # <-


def replaced_before_the_first_forward(run, model, optimizer):
    model[0].weight = nn.Parameter(torch.zeros(13, 6))  # <-
    whole(run, model)


def replaced_within_a_step(run, model, optimizer):
    for step in own(run):
        for batch in step:
            if step.number == 2:
                model[0].weight = nn.Parameter(torch.zeros(13, 6))  # <-
            step.backward(loops.loss(model, batch))
        step.update()


def layer_replaced(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
        model[4] = nn.Linear(13, 3)  # <-
        step.update()


def frozen_later(run, model, optimizer):
    for step in own(run):
        if step.number == 2:
            model[0].bias.requires_grad_(False)  # <-
        for batch in step:
            step.backward(loops.loss(model, batch))
        step.update()


def moved(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
        step.update()
        model.double()  # <-


def written_within_a_step(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
            with torch.no_grad():
                model[0].bias.add_(1)  # <-
        step.update()


def written_before_a_backward(run, model, optimizer):
    for step in own(run):
        for batch in step:
            loss = loops.loss(model, batch)
            with torch.no_grad():
                model[4].bias.add_(1)  # <-
            step.backward(loss)
        step.update()


def statistics_reset(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
        step.update()
        model[1].reset_running_stats()  # <-


def statistics_written_within_a_step(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
        model[1].running_mean.zero_()  # <-
        step.update()


def training_in_an_evaluation(run, model, optimizer):
    for batch in run.each(loops.data(), batch=8):
        model.train()  # <-
        model(batch[0])


def dropout_in_an_evaluation(run, model, optimizer):
    for batch in run.each(loops.data(), batch=8):
        model[3].train()  # <-
        model(batch[0])


def written_in_an_evaluation(run, model, optimizer):
    with torch.no_grad():
        for batch in run.each(loops.data(), batch=8):
            model(batch[0])
            model[0].weight.mul_(0.5)  # <-


def another_mode_in_a_microbatch(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model.eval(), batch))  # <-
        step.update()


def step_hook(run, model, optimizer):
    optimizer.register_step_pre_hook(print)  # <-
    whole(run, model)


def group_added(run, model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})  # <-
    whole(run, model)


def state_loaded(run, model, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())  # <-
    whole(run, model)


def gradient_hook(run, model, optimizer):
    for step in own(run):
        model[0].weight.register_hook(lambda gradient: gradient * 2)  # <-
        for batch in step:
            step.backward(loops.loss(model, batch))
        step.update()


def scheduler_made_before(run, model, optimizer):
    schedule = StepLR(optimizer, 1)
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
        step.update()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no optimizer has stepped
            schedule.step()  # <-


def other_form(run, model, optimizer):
    def after(step):
        optimizer.param_groups[0]["amsgrad"] = True  # <-

    whole(run, model, after)


def old_group_changed(run, model, optimizer):
    group = run.old_group
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
        group["weight_decay"] = 0.5
        step.update()  # <-


def called_again(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))
            model(batch[0])  # <-
        step.update()


def counter_in_the_forward(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))  # <-
        step.update()


def spectral(run, model, optimizer):
    for step in own(run):
        for batch in step:
            step.backward(loops.loss(model, batch))  # <-
        step.update()


class Counting(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs):
        self.calls += 1
        return inputs


MODELS: dict[Loop, Callable[[], nn.Module]] = {
    counter_in_the_forward: lambda: nn.Sequential(*loops.net(), Counting()),
    spectral: lambda: nn.Sequential(*loops.net()[:4], nn.utils.parametrizations.spectral_norm(nn.Linear(13, 3))),
}


def parameter_outside(run, model, optimizer):
    scale = nn.Parameter(torch.ones(()))
    for step in own(run):
        for batch in step:
            step.backward(scale * loops.loss(model, batch))  # <-
        step.update()


REFUSED: dict[Loop, str] = {
    parameter_outside: "step 1: the loss depends on a parameter of shape [] that is not in the placed model",
    counter_in_the_forward: "the forward moves buffer 5.calls of Counting",
    spectral: "the forward moves buffer 4.parametrizations.weight.0._u of _SpectralNorm",
    scaled_gradient: "step 1: a gradient of the placed model was written",
    clipped_by_hand: "step 1: a gradient of the placed model was written",
    clipped_by_value_of_the_optimizer: "step 1: a gradient of the placed model was written",
    clamped_through_data: "step 1: a gradient of the placed model was written",
    clipped_in_each_microbatch: "step 1: a gradient of the placed model was written",
    gradient_set: "step 1: the gradient of 0.bias was set",
    gradients_removed: "step 1: the gradient of 0.weight was removed",
    zero_grad_of_the_optimizer: "optimizer.zero_grad() is not this loop's to call",
    own_backward: "a backward that is not step.backward",
    own_backward_later: "",
    data_set: "0.weight was given other memory",
    written_through_data: "0.weight was written",
    weights_clipped: "0.weight was written",
    old_parameters_written: "0.weight was written",
    average_copied_in: "0.weight was written",
    replaced: "0.weight was replaced",
    replaced_before_the_first_forward: "0.weight was replaced",
    replaced_within_a_step: "step 2: 0.weight was replaced",
    layer_replaced: "step 1: 4 was replaced",
    frozen_later: "step 2: 0.bias was frozen",
    moved: " was ",
    written_within_a_step: "step 1: 0.bias was written",
    written_before_a_backward: "step 1: 4.bias was written",
    statistics_reset: "a running statistic of BatchNorm was written",
    statistics_written_within_a_step: "step 1: a running statistic of BatchNorm was written",
    training_in_an_evaluation: "the model was put into training",
    dropout_in_an_evaluation: "3 was put into training",
    written_in_an_evaluation: "0.weight was written",
    another_mode_in_a_microbatch: "step 1: the model was put into evaluation",
    step_hook: "optimizer.register_step_pre_hook() is not this loop's to call",
    group_added: "optimizer.add_param_group() is not this loop's to call",
    state_loaded: "optimizer.load_state_dict() is not this loop's to call",
    gradient_hook: "step 1: 0.weight was given a hook of its gradient",
    scheduler_made_before: "the optimizer's rate was changed",
    other_form: "amsgrad of a group of the optimizer was changed",
    old_group_changed: "step 1: a group that was taken from the optimizer before run.place",
    called_again: "step 1: the placed model is called between two micro-batches: step.backward at ",
}


# What is not refused gives one hash on all placements.


def plain(run, model, optimizer):
    whole(run, model, clip=1.0)


def looked_at(run, model, optimizer):
    """Log norms of weights and gradients, keep an average outside of the model, and empty gradients where none are."""
    average = deepcopy({name: each.detach() for name, each in model.state_dict().items()})
    seen = []
    for step in own(run):
        model.zero_grad()
        for batch in step:
            step.backward(loops.loss(model, batch))
        seen.append([float(each.grad.norm()) for each in model.parameters() if each.grad is not None])
        step.update(clip=1.0)
        with torch.no_grad():
            for name, each in model.state_dict().items():
                if each.is_floating_point():
                    average[name].lerp_(each, 0.1)
        seen.append([float(each.data.detach().norm()) for each in optimizer.param_groups[0]["params"]])
    assert len(seen) == 6


def scheduled(run, model, optimizer):
    """Schedule the settings of groups, as DINO does its weight decay."""

    def after(step):
        for number, group in enumerate(optimizer.param_groups):
            group["weight_decay"] = 0.1 * step.number * (1 + number)
            group["betas"] = 0.9 - 0.1 * step.number, 0.99

    whole(run, model, after)


def resting(run, model, optimizer):
    """Let a group rest after a step."""
    before = model[0].weight.detach().clone()

    def after(step):
        optimizer.param_groups[0]["lr_scale"] = 0.0

    whole(run, model, after)
    assert float((model[0].weight.detach() - before).abs().sum()) > 0  # a DTensor of torch 2.11 has no !=


def teacher(run, model, optimizer):
    """Ask the model itself in evaluation, within a micro-batch, for what it is to learn."""
    for step in own(run):
        for inputs, _ in step:
            with torch.no_grad():
                targets = model.eval()(inputs).softmax(1)
            model.train()
            step.backward(F.cross_entropy(model(inputs), targets, reduction="sum"))
        step.update()


def attacked(run, model, optimizer):
    """Let inputs that want a gradient into the model."""
    for step in own(run):
        for inputs, targets in step:
            noisy = inputs.clone().requires_grad_()
            step.backward(F.cross_entropy(model(noisy), targets, reduction="sum"))
            assert noisy.grad is not None
        step.update()


def frozen_statistics(run, model, optimizer):
    """Freeze BatchNorm's statistics after a step."""
    whole(run, model, lambda step: model[1].eval())


ALIKE: list[Loop] = [plain, looked_at, scheduled, resting, teacher, attacked, frozen_statistics]


def ended(world: World, strategy: str, name: str) -> str:
    """Run a loop as a rank of `world`; return what it was refused with, or the hash of what it trained."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    given = settings(3, None, "fp32", 1, None, None)
    life: Any = SimpleNamespace(status=None)
    member = Member(given, life, Rank(life, world, None, {}, {}), None, ExitStack())
    seed_generators(random.key(random.INITIAL, 3))
    run: Any = Run(member)
    loop = globals()[name]
    model: Any = MODELS.get(loop, loops.net)()
    optimizer = torch.optim.AdamW([{"params": model[:2].parameters()}, {"params": model[2:].parameters()}], lr=1e-2)
    run.old_group = optimizer.param_groups[0]
    model, optimizer = run.place(model, optimizer, strategy)
    try:
        loop(run, model, optimizer)
        return str(run.fingerprint())
    except UsageError as error:
        return str(error)
    finally:
        run._placed.guard.close()
        member.held.close()  # it watches exchanges
        torch.use_deterministic_algorithms(deterministic)


def outcomes(loop: Loop, number: int, sizes: Sequence[int], every: bool) -> dict[tuple[int, str], str]:
    """Run a loop on one process, and on so many under one strategy or under `every` one; say what its ranks came to.

    Which strategy that is follows from the `number` of the loop and the size, so that each has its share of the loops.
    """
    table = {}
    chosen = [(size, STRATEGIES[(number + size) % len(STRATEGIES)]) for size in sizes]
    placed = [(size, name) for size in sizes for name in STRATEGIES] if every else chosen
    for size, strategy in [(1, "single"), *placed]:
        [table[size, strategy]] = {*worlds.run(size, ended, strategy, loop.__name__)}
    return table


def numbered(loops: Iterable[Loop]) -> list[Any]:
    return [pytest.param(number, loop, id=loop.__name__) for number, loop in enumerate(loops)]


EVERY = pytest.mark.extended("the gate has each loop under one strategy of the four, and each of them with many loops")
PLACED = pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=EVERY)], ids=["one strategy", "every strategy"]
)


# Two ranks have as many micro-batches each, and so end at once. Of three one would still wait for the others.
@pytest.mark.worlds
@PLACED
@pytest.mark.parametrize(("number", "loop"), numbered(REFUSED))
def test_a_loop_is_refused_with_its_line_under_all_strategies(loop: Loop, number: int, every: bool) -> None:
    for place, text in outcomes(loop, number, (2,), every).items():
        assert REFUSED[loop] in text, (place, text)
        assert named(text, loop), (place, text)


@pytest.mark.worlds
@PLACED
@pytest.mark.parametrize(("number", "loop"), numbered(ALIKE))
def test_a_loop_gives_one_hash_under_all_strategies(loop: Loop, number: int, every: bool) -> None:
    found = outcomes(loop, number, (2, 3), every)
    assert len({*found.values()}) == 1, found
    assert re.fullmatch("[0-9a-f]{64}", *{*found.values()})


def called_as_samples_say(run, model, optimizer):
    """Call the model once more for some micro-batches, which one of two ranks has first."""
    for step in own(run):
        for inputs, targets in step:
            outputs = model(inputs)
            if inputs[0, 0] > 0:
                outputs = outputs + model(-inputs)
            step.backward(F.cross_entropy(outputs, targets, reduction="sum"))
        step.update()


def called_without_gradients_first(run, model, optimizer):
    for step in own(run):
        for inputs, targets in step:
            if inputs[0, 0] > 0:
                with torch.no_grad():
                    model(-inputs)
            step.backward(F.cross_entropy(model(inputs), targets, reduction="sum"))
        step.update()


def evaluated_as_samples_say(run, model, optimizer):
    whole(run, model)
    sums = []
    for inputs, _ in run.each(loops.data(), batch=4):
        sums.append(model(inputs).sum())
        if inputs[0, 0] > 0:
            sums[-1] += model(-inputs).sum()
    run.sum(sums)


@pytest.mark.worlds
@pytest.mark.parametrize(
    "loop", [called_as_samples_say, called_without_gradients_first, evaluated_as_samples_say], ids=lambda e: e.__name__
)
def test_ranks_that_call_a_model_differently_end_where_calls_exchange_parts_of_it(loop: Loop) -> None:
    for strategy in ("zero2", "zero3"):
        for text in worlds.run(2, ended, strategy, loop.__name__):
            assert "ranks call the placed model differently" in text
    assert len({*worlds.run(1, ended, "single", loop.__name__), *worlds.run(2, ended, "ddp", loop.__name__)}) == 1


def named(text: str, loop: Loop) -> bool:
    """Return whether a message names the marked line of a loop: alone, or between two lines of which it is."""
    lines, first = inspect.getsourcelines(loop)
    [marked] = [first + number for number, line in enumerate(lines) if line.rstrip().endswith("# <-")]
    if found := re.search(r"between \S+:(\d+) and \S+:(\d+)\)", text):
        begin, end = map(int, found.groups())
        return begin <= marked <= end or not begin <= end  # or around the end of a loop
    if found := re.search(r"since \S+:(\d+)\)", text):  # once around the loop
        return first < int(found[1]) < first + len(lines)
    return f"test_own_guard.py:{marked})" in text
