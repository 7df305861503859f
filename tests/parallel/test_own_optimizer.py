"""Optimizers by import path: what is asked of one, whether it may be cut, and every complaint with its line."""

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import own_optimizers
import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.common.user_code import format_location
from lockstep.errors import UsageError, UserCodeError
from lockstep.parallel.optimize import make_optimizer
from lockstep.parallel.optimizer_trials import check_custom_optimizer, check_optimizer, check_row_updates

FILE = Path(own_optimizers.__file__)


def named(name: str, **changes: Any) -> Callable[[Iterable[tuple[str, Parameter]]], Optimizer]:
    return partial(make_optimizer, name=f"own_optimizers:{name}", **({"lr": 0.1} | changes))


def parameters() -> list[tuple[str, Parameter]]:
    return [("weight", Parameter(torch.ones(2, 2))), ("bias", Parameter(torch.ones(2)))]


def place(text: str) -> str:
    """Return the line of the file that has a text, as messages show it."""
    lines = FILE.read_text().splitlines()
    return format_location(str(FILE), next(number for number, line in enumerate(lines, 1) if text in line))


@pytest.mark.parametrize(
    "make",
    [
        named("Lion"),
        named("Lion", weight_decay=0.1, options={"beta": 0.5}, decay_bias_and_norm=False),
        named("slow_adam", weight_decay=0.1, options={"betas": [0.8, 0.9]}),
        partial(make_optimizer, name="torch.optim:RMSprop", lr=0.1, momentum=0.5),
    ],
)
def test_what_works_may_also_be_cut(make: Any) -> None:
    check_optimizer(make)
    check_custom_optimizer("x:y", make)
    assert not check_row_updates(make, "zero1", lends_wholes=False)


def test_groups_have_their_options_and_names() -> None:
    optimizer = named("Lion", weight_decay=0.1, decay_bias_and_norm=False)(parameters())
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.1, 0.1), (0.1, 0.0)]
    assert [group["param_names"] for group in optimizer.param_groups] == [["weight"], ["bias"]]


def test_torchs_own_form_is_chosen_here_for_a_class_that_has_forms() -> None:
    made = make_optimizer(parameters(), name="torch.optim:Adam", lr=0.1)
    assert made.defaults["foreach"] is True


def test_an_optimizer_that_updates_rows_differently_needs_whole_tensors() -> None:
    check_custom_optimizer("x:y", named("Centered"))
    with pytest.raises(UsageError, match=r"its step fails if a tensor has no gradient: .*; .* so skip such tensors"):
        check_row_updates(named("Centered"), "zero2", lends_wholes=True)
    assert check_row_updates(named("CenteredIfAny"), "zero2", lends_wholes=True)
    with pytest.raises(
        UsageError, match="strategy pipeline: optimizer Centered updates rows of a tensor differently than"
    ):
        check_row_updates(named("Centered"), "pipeline", lends_wholes=False)


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("Lio", {}, "optimizer own_optimizers:Lio: module own_optimizers ({file}) has no 'Lio'; did you mean 'Lion'?"),
        ("number", {}, "optimizer own_optimizers:number: expected a class or a function, got an object of type int"),
        (
            "without_rate",
            {},
            "optimizer own_optimizers:without_rate: has no argument lr; use the arguments (params, lr, ...)",
        ),
        ("nothing", {}, "optimizer own_optimizers:nothing: returned a NoneType; return a torch.optim.Optimizer"),
        ("first_only", {}, "optimizer own_optimizers:first_only: its groups do not contain bias"),
        ("Lion", {"momentum": 0.9}, "optimizer own_optimizers:Lion: has no option momentum; valid: beta, weight_decay"),
        ("Lion", {"options": {"bet": 0.9}}, "has no option bet; did you mean 'beta'?"),
        ("Lion", {"options": {"beta": 2}}, "optimizer own_optimizers:Lion: ValueError: a beta of 2 ({line})"),
        ("Forgetful", {"decay_bias_and_norm": False}, "own_optimizers:Forgetful: has no option weight_decay"),
    ],
)
def test_what_cannot_be_made_is_told(name: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        named(name, **changes)(parameters())
    assert told.format(file=FILE, line=place("raise ValueError")).lower() in str(caught.value).lower()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Forgetful", "produces different weights when resumed from a checkpoint; keep all state in self.state"),
        ("Deaf", "its step does not depend on the learning rate; multiply the update by group['lr']"),
        ("Noisy", "two instances with the same inputs produced different weights; do not draw random numbers"),
    ],
)
def test_what_would_not_go_on_to_the_same_bits_is_refused(name: str, told: str) -> None:
    check_optimizer(named(name))
    with pytest.raises(UsageError, match=re.escape(f"optimizer own_optimizers:{name}: {told}")):
        check_custom_optimizer(f"own_optimizers:{name}", named(name))


def test_an_error_in_a_step_has_its_line() -> None:
    told = f"optimizer Broken: a step without a closure failed: KeyError: 'exp_avg' ({place('exp_avg')}); fix it there"
    with pytest.raises(UsageError, match=re.escape(told)):
        check_optimizer(named("Broken"))
    with pytest.raises(UserCodeError, match=re.escape(f"({place('exp_avg')})")):
        check_custom_optimizer("own_optimizers:Broken", named("Broken"))
