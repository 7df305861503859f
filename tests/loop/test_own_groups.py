"""Settings of an optimizer's groups: which are handed on, compared and kept, and which are refused."""

import json
import re

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from lockstep.errors import UsageError
from lockstep.loop.model_check import UserParamGroups


def made() -> tuple[AdamW, list[dict], UserParamGroups]:
    two = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = AdamW([{"params": [each]} for each in two], lr=0.1, weight_decay=0.5)
    of_engine = [{**each, "steps": 7} for each in optimizer.param_groups]
    of_engine[1]["lr_scale"] = 10.0
    return optimizer, of_engine, UserParamGroups(optimizer, of_engine)


def test_numbers_are_handed_on_and_nothing_else_is_touched():
    optimizer, of_engine, groups = made()
    assert optimizer.param_groups[1]["lr_scale"] == 10.0
    groups.apply_to(of_engine, 1)
    assert groups.collect_changes() == [{}, {}]
    first, second = optimizer.param_groups
    first["weight_decay"], first["betas"], first["lr_scale"] = 0.25, (0.5, 0.75), 0.0
    second.update(eps=1e-3)
    first["initial_lr"] = first["lr"] = 0.1  # as a scheduler notes it
    groups.apply_to(of_engine, 2)
    assert of_engine[0].items() >= {"weight_decay": 0.25, "betas": (0.5, 0.75), "lr_scale": 0.0, "steps": 7}.items()
    assert of_engine[1].items() >= {"weight_decay": 0.5, "eps": 1e-3, "lr_scale": 10.0, "steps": 7}.items()


def test_what_was_changed_is_taken_over_from_a_file():
    optimizer, of_engine, groups = made()
    optimizer.param_groups[0].update(weight_decay=0.25, betas=(0.5, 0.75))
    groups.apply_to(of_engine, 1)
    kept = json.loads(json.dumps(groups.collect_changes()))
    other, of_other, later = made()
    assert (
        later.get_compared_values(1, {"lr": 0.1})
        != groups.get_compared_values(1, {"lr": 0.1})
        != groups.get_compared_values(2, {"lr": 0.2})
    )
    later.load(kept, of_other)
    assert later.get_compared_values(3, {"lr": 0.1}) == groups.get_compared_values(3, {"lr": 0.1})
    for group in other.param_groups[0], of_other[0]:
        assert (group["weight_decay"], group["betas"]) == (0.25, (0.5, 0.75))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("lr", 0.2, "the lr of an optimizer group was changed"),
        ("amsgrad", True, "amsgrad of an optimizer group was changed"),
        ("foreach", True, "foreach of an optimizer group"),
        ("betas", (0.9,), "betas of an optimizer group"),
        ("weight_decay", None, "weight_decay of an optimizer group"),
        ("weight_decay", torch.ones(()), "weight_decay of an optimizer group"),
        ("lr_scale", "none", "lr_scale of an optimizer group"),
        ("params", [], "params of an optimizer group"),
    ],
)
def test_all_else_is_refused_in_the_line_that_sets_it(name, value, text):
    optimizer, of_engine, groups = made()
    with pytest.raises(UsageError, match=rf"^{re.escape(text)}.*test_own_groups\.py:\d+"):
        optimizer.param_groups[0][name] = value
    optimizer.param_groups[0].update({name: value})  # which asks nobody
    with pytest.raises(UsageError, match=rf"^step 3: {re.escape(text)}"):
        groups.apply_to(of_engine, 3)


def test_the_message_about_a_rate_names_what_gives_each_group_its_own_schedule():
    optimizer, _, _ = made()
    with pytest.raises(
        UsageError, match=r"run\.place\(.*scheduler=torch\.optim\.lr_scheduler\.LambdaLR\(optimizer, \[f, g\]\)"
    ):
        optimizer.param_groups[1]["lr"] = 0.2


def test_groups_that_were_taken_before_or_replaced_are_refused():
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    before = optimizer.param_groups[0]
    groups = UserParamGroups(optimizer, optimizer.param_groups)
    before["momentum"] = 0.9
    with pytest.raises(UsageError, match="an optimizer group that you read before"):
        groups.apply_to([{}], 1)
    before["momentum"] = 0
    optimizer.param_groups = [{**optimizer.param_groups[0]}]
    with pytest.raises(UsageError, match="the optimizer groups were replaced"):
        groups.apply_to([{}], 1)
