"""What the optimizer's groups say of each parameter, and the groups that are made of it."""

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lockstep.errors import UsageError
from lockstep.parallel.groups import GroupSettings, compute_parameter_options, find_distinct_options
from lockstep.parallel.optimize import make_optimizer
from lockstep.parallel.optimizer_step import store_lr_ratios

NAMES = ["stem.weight", "stem.bias", "block.weight", "block.bias", "head.weight"]


def made(special: dict[str, dict[str, Any]], **changes: Any) -> list[tuple[list[str], float, float, Any]]:
    """Return for each group its names, its rate, its weight decay and its scale."""
    parameters = [(name, Parameter(torch.ones((2,) * (1 + name.endswith("weight"))))) for name in NAMES]
    optimizer = make_optimizer(
        parameters, name="sgd", lr=0.1, weight_decay=0.5, settings=lambda name: special.get(name, {}), **changes
    )
    store_lr_ratios(optimizer)
    return [
        (group["param_names"], group["lr"], group["weight_decay"], group.get("lr_scale"))
        for group in optimizer.param_groups
    ]


def test_the_first_group_that_matches_counts_and_scales_multiply() -> None:
    groups = [GroupSettings(["head.*"], 3.0), GroupSettings(["*.weight"], 2.0, {"weight_decay": 0.0})]
    found = compute_parameter_options(NAMES, groups, {"stem.weight": 0.25, "stem.bias": 0.25, "block.weight": 0.5})
    assert found == {
        "stem.weight": {"weight_decay": 0.0, "lr_scale": 0.5},
        "stem.bias": {"lr_scale": 0.25},
        "block.weight": {"weight_decay": 0.0},  # 2 * 0.5 is the optimizer's own rate
        "head.weight": {"lr_scale": 3.0},
    }
    assert len(find_distinct_options(found)) == 4


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([GroupSettings(["heed.*"])], r"recipe.optimizer.groups\[0\].match: 'heed.\*' matches no trained parameter"),
        (
            [GroupSettings(["*"]), GroupSettings(["head.*"])],
            r"groups\[1\].match: earlier groups already match every parameter that head.\* matches",
        ),
    ],
)
def test_groups_that_select_nothing_are_refused(groups: list[GroupSettings], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        compute_parameter_options(NAMES, groups, {})


def test_parameters_alike_are_one_group() -> None:
    special = {"head.weight": {"lr_scale": 3.0}, "stem.bias": {"lr_scale": 3.0}}
    assert made(special) == [
        (["stem.weight", "block.weight", "block.bias"], 0.1, 0.5, None),
        (["stem.bias", "head.weight"], 0.1, 0.5, 3.0),
    ]


def test_what_a_group_says_wins_over_the_rule_for_biases() -> None:
    special = {"stem.bias": {"weight_decay": 0.25}}
    assert made(special, decay_bias_and_norm=False) == [
        (["stem.weight", "block.weight", "head.weight"], 0.1, 0.5, None),
        (["stem.bias"], 0.1, 0.25, None),
        (["block.bias"], 0.1, 0.0, None),
    ]


def test_an_option_that_the_optimizer_has_not_is_refused() -> None:
    with pytest.raises(UsageError, match=r"optimizer sgd, recipe.optimizer.groups: has no option betas"):
        made({"head.weight": {"betas": [0.9, 0.99]}})
