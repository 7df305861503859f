"""What a loop does to what is placed: under all strategies alike refused with its line."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import loops
import pytest
import torch
import worlds
from loop_ends import Loop, ended, names
from torch import nn
from torch.nn import functional as F

from lockstep.comm.world import World

pytestmark = pytest.mark.worlds
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def nothing(step: Any) -> None:
    pass


def whole(
    run: Any,
    model: nn.Module,
    after: Callable[[Any], None] = nothing,
    *,
    before: Callable[[Any], None] = nothing,
    forward: Callable[[Any], None] = nothing,
    backward: Callable[[Any], None] = nothing,
    each: Callable[[Any], None] = nothing,
    last: Callable[[Any], None] = nothing,
    **update: Any,
) -> None:
    """Train by steps that are as they should be, but for what is done at these places of them."""
    for step in loops.steps(run):
        before(step)
        for batch in step:
            forward(step)
            loss = loops.loss(model, batch)
            backward(step)
            step.backward(sum=loss)
            each(step)
        last(step)
        step.update(**update)
        after(step)


REFUSED: dict[Loop, str] = {}  # with a part of the message
AT: dict[Loop, str] = {}  # where `whole` does what is no loop by itself


def refused(text: str, at: str = "") -> Callable[[Loop], Loop]:
    """Note a loop that is refused, or what `whole` does `at` a place, given the step, the model and the optimizer."""

    def noted(loop: Loop) -> Loop:
        REFUSED[loop] = text
        AT[loop] = at
        return loop

    return noted


# The mark is in the line that the message has to name, or that is between the two that it names.


@refused("step 1: a gradient of the placed model was modified", "last")
def clipped_by_value_of_the_optimizer(step, model, optimizer):
    nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 0.1)  # <-


@refused("step 1: a gradient of the placed model was modified", "each")
def clipped_in_each_microbatch(step, model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <-


@refused("step 1: the gradient of 0.bias was set", "last")
def gradient_set(step, model, optimizer):
    model[0].bias.grad = torch.zeros_like(model[0].bias)  # <-


@refused("step 1: the gradient of 0.weight was removed", "each")
def gradients_removed(step, model, optimizer):
    model.zero_grad()  # <-


@refused("")
def own_backward_later(run, model, optimizer):
    for step in loops.steps(run):
        for batch in step:
            loss = loops.loss(model, batch)
            if step.number == 2:
                loss.backward(retain_graph=True)  # <-
            step.backward(sum=loss)
        step.update()


@refused("the storage of 0.weight was replaced", "after")
def data_set(step, model, optimizer):
    model[0].weight.data = model[0].weight.data * 0.5  # <-


@refused("0.weight was modified", "after")
def old_parameters_written(step, model, optimizer):
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].mul_(2)  # <-


@refused("0.weight was replaced", "after")
def replaced(step, model, optimizer):
    model[0].weight = nn.Parameter(torch.zeros(13, 6))  # <-


@refused("0.weight was replaced")
def replaced_before_the_first_forward(run, model, optimizer):
    model[0].weight = nn.Parameter(torch.zeros(13, 6))  # <-
    whole(run, model)


@refused("step 2: 0.weight was replaced", "forward")
def replaced_within_a_step(step, model, optimizer):
    if step.number == 2:
        model[0].weight = nn.Parameter(torch.zeros(13, 6))  # <-


@refused("step 1: 4 was replaced", "last")
def layer_replaced(step, model, optimizer):
    model[4] = nn.Linear(13, 3)  # <-


@refused(" was ", "after")
def moved(step, model, optimizer):
    model.double()  # <-


@refused("step 1: 0.bias was modified", "each")
def written_within_a_step(step, model, optimizer):
    with torch.no_grad():
        model[0].bias.add_(1)  # <-


@refused("step 1: 4.bias was modified", "backward")
def written_before_a_backward(step, model, optimizer):
    with torch.no_grad():
        model[4].bias.add_(1)  # <-


# After the first updates most checks only look for changes that would not stay.


@refused("step 12: 0.bias was modified")
def written_in_a_late_step(run, model, optimizer):
    for step in loops.steps(run, epochs=6):
        for batch in step:
            loss = loops.loss(model, batch)
            step.backward(sum=loss)
        if step.number == 12:
            with torch.no_grad():
                model[0].bias.add_(1)  # <-
        step.update()


@refused("step 13: 0.weight was modified")
def written_after_a_late_update(run, model, optimizer):
    for step in loops.computed(run, model, epochs=6):
        step.update()
        if step.number == 12:
            with torch.no_grad():
                model[0].weight.add_(1)  # <-


@refused("step 12: 4 was replaced")
def layer_replaced_in_a_late_step(run, model, optimizer):
    for step in loops.steps(run, epochs=6):
        for batch in step:
            step.backward(sum=loops.loss(model, batch))
            if step.number == 12:
                model[4] = nn.Linear(13, 3)  # <-
        step.update()


@refused("step 12: 0.weight was frozen")
def frozen_in_a_late_step(run, model, optimizer):
    for step in loops.steps(run, epochs=6):
        for batch in step:
            step.backward(sum=loops.loss(model, batch))
        if step.number == 12:
            model[0].weight.requires_grad_(False)  # <-
        step.update()


@refused("steps 9 to 65: a gradient hook was added to 0.weight")
def late_gradient_hook(run, model, optimizer):
    for step in loops.computed(run, model, epochs=22):
        if step.number == 12:
            model[0].weight.register_hook(lambda gradient: gradient * 2)  # <-
        step.update()


@refused("a gradient hook was added to 0.weight")
def gradient_hook_in_the_last_step(run, model, optimizer):
    for step in loops.computed(run, model, epochs=4):
        step.update()
        if step.number == 12:
            model[0].weight.register_hook(lambda gradient: gradient * 2)  # <-


@refused("1.running_mean, a running statistic of BatchNorm, was modified", "after")
def statistics_reset(step, model, optimizer):
    model[1].reset_running_stats()  # <-


@refused("step 1: 1.running_var, a running statistic of BatchNorm, was modified", "forward")
def statistics_written_before_a_forward(step, model, optimizer):
    model[1].running_var.data.mul_(2)  # <-


@refused("step 1: 1.running_mean, a running statistic of BatchNorm, was modified", "backward")
def statistics_written_after_a_forward(step, model, optimizer):
    model[1].running_mean.mul_(0.5)  # <-


@refused("step 1: 1.running_mean, a running statistic of BatchNorm, was modified", "last")
def statistics_written_within_a_step(step, model, optimizer):
    model[1].running_mean.zero_()  # <-


@refused("the model was switched to training mode")
def training_in_an_evaluation(run, model, optimizer):
    for batch in run.each(loops.data(), batch=8):
        model.train()  # <-
        model(batch[0])


@refused("3 was switched to training mode")
def dropout_in_an_evaluation(run, model, optimizer):
    for batch in run.each(loops.data(), batch=8):
        model[3].train()  # <-
        model(batch[0])


@refused("0.weight was modified")
def written_in_an_evaluation(run, model, optimizer):
    with torch.no_grad():
        for batch in run.each(loops.data(), batch=8):
            model(batch[0])
            model[0].weight.mul_(0.5)  # <-


@refused("optimizer.register_step_pre_hook() is not supported after run.place")
def step_hook(run, model, optimizer):
    optimizer.register_step_pre_hook(print)  # <-
    whole(run, model)


@refused("optimizer.add_param_group() is not supported after run.place")
def group_added(run, model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})  # <-
    whole(run, model)


@refused("optimizer.load_state_dict() is not supported after run.place")
def state_loaded(run, model, optimizer):
    optimizer.load_state_dict({})  # <-
    whole(run, model)


@refused("step 1: a gradient hook was added to 0.weight", "before")
def gradient_hook(step, model, optimizer):
    model[0].weight.register_hook(lambda gradient: gradient * 2)  # <-


@refused("step 1: the placed model is called between two micro-batches: step.backward at ", "each")
def called_again(step, model, optimizer):
    model(torch.ones(2, 6))  # <-


@refused("amsgrad of an optimizer group was changed", "after")
def other_form(step, model, optimizer):
    optimizer.param_groups[0]["amsgrad"] = True  # <-


@refused("step 1: an optimizer group that you read before run.place")
def old_group_changed(run, model, optimizer):
    group = run.old_group
    for step in loops.computed(run, model, epochs=1):
        group["weight_decay"] = 0.5
        step.update()  # <-


@refused("step 2: params of an optimizer group were changed")
def parameter_taken_out(run, model, optimizer):
    for step in loops.computed(run, model, epochs=1):
        step.update()  # <-
        optimizer.param_groups[0]["params"].pop()


def guarded(world: World, strategy: str, loop: Loop) -> str:
    """Place a model, and run a loop of it as a rank of `world`; return what that came to."""

    def of_run(run: Any) -> None:
        model = loops.net()
        optimizer = torch.optim.AdamW([{"params": model[:2].parameters()}, {"params": model[2:].parameters()}], lr=1e-2)
        run.old_group = optimizer.param_groups[0]
        model, optimizer = run.place(model, optimizer)
        if at := AT.get(loop):
            whole(run, model, **{at: lambda step: loop(step, model, optimizer)})
        else:
            loop(run, model, optimizer)

    return ended(world, strategy, of_run)


EVERY = pytest.mark.slow("quick tests have each loop under one strategy of the four, and each of them with many loops")
PLACED = [
    *(pytest.param(loop, [STRATEGIES[n % 4]], id=loop.__name__) for n, loop in enumerate(REFUSED)),
    *(pytest.param(loop, STRATEGIES, id=f"{loop.__name__}-every strategy", marks=EVERY) for loop in REFUSED),
]


# Two ranks have as many micro-batches each, and so end at once. Of three one would still wait for the others.
@pytest.mark.parametrize(("loop", "strategies"), PLACED)
def test_a_loop_is_refused_with_its_line_under_all_strategies(loop: Loop, strategies: Sequence[str]) -> None:
    for size, strategy in [(1, "single"), *((2, each) for each in strategies)]:
        [text] = {*worlds.run(size, guarded, strategy, loop)}
        assert REFUSED[loop] in text, (strategy, text)
        assert named(text, loop), (strategy, text)


def called_as_samples_say(run, model, optimizer):
    """Call the model once more for some micro-batches, which one of two ranks has first."""
    for step in loops.steps(run):
        for inputs, targets in step:
            outputs = model(inputs)
            if inputs[0, 0] > 0:
                outputs = outputs + model(-inputs)
            step.backward(sum=F.cross_entropy(outputs, targets, reduction="sum"))
        step.update()


def called_without_gradients_first(run, model, optimizer):
    for step in loops.steps(run):
        for inputs, targets in step:
            if inputs[0, 0] > 0:
                with torch.no_grad():
                    model(-inputs)
            step.backward(sum=F.cross_entropy(model(inputs), targets, reduction="sum"))
        step.update()


def evaluated_as_samples_say(run, model, optimizer):
    whole(run, model)
    sums = []
    for inputs, _ in run.each(loops.data(), batch=4):
        sums.append(model(inputs).sum())
        if inputs[0, 0] > 0:
            sums[-1] += model(-inputs).sum()
    run.sum(sums)


@pytest.mark.parametrize(
    "loop", [called_as_samples_say, called_without_gradients_first, evaluated_as_samples_say], ids=lambda e: e.__name__
)
def test_ranks_that_call_a_model_differently_end_where_calls_exchange_parts_of_it(loop: Loop) -> None:
    for strategy in ("zero2", "zero3"):
        for text in worlds.run(2, guarded, strategy, loop):
            assert "ranks call the placed model differently" in text
    assert len({*worlds.run(1, guarded, "single", loop), *worlds.run(2, guarded, "ddp", loop)}) == 1


def evaluation_left(run: Any, ranks: Collection[int], then: Callable[[Any], object]) -> None:
    model, _ = loops.placed(run)
    for number, (inputs, _) in enumerate(run.each(loops.data(), batch=4)):
        model(inputs)
        if number == 1 and run.rank in ranks:
            break  # <-
    then(run)


def left(world: World, strategy: str, ranks: Collection[int], what: str) -> str:
    calls: dict[str, Callable[[Any], object]] = {
        "fingerprint": lambda run: run.fingerprint(),
        "nothing": lambda run: run.close(),
        "steps": lambda run: [*run.steps(loops.data(), batch=16, steps=1)],
    }
    return ended(world, strategy, partial(evaluation_left, ranks=ranks, then=calls[what]))


@pytest.mark.parametrize("then", ["fingerprint", "nothing", "steps"])
def test_an_evaluation_that_one_rank_leaves_is_refused_on_all_ranks_where_calls_exchange_parts(then: str) -> None:
    for strategy in ("zero2", "zero3"):
        for text in worlds.run(2, left, strategy, {1}, then):
            assert "run.each: rank 1 left the loop before its last batch, and rank 0 did not (tests/loop" in text
        assert names(text, evaluation_left)  # of rank 1


def test_an_evaluation_that_all_ranks_leave_is_as_good_as_one_that_ends() -> None:
    alone = worlds.run(1, left, "single", {0}, "fingerprint")
    assert worlds.run(2, left, "zero3", {0, 1}, "fingerprint") == alone * 2


def named(text: str, loop: Loop) -> bool:
    """Return whether a message names the marked line of a loop, or that in which `whole` does it."""
    return names(text, loop) or bool(AT[loop] and names(text, whole, f"{AT[loop]}(step)"))
