"""Optimizers by name: the right class, the right groups, the right complaint."""

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from test_own_optimizer import parameters
from torch import nn

from lockstep.errors import UsageError
from lockstep.parallel.optimize import make_optimizer, unwrap_step
from lockstep.parallel.optimizer_trials import (
    check_optimizer,
    check_row_updates,
    check_stored_dtype,
    needs_full_tensors,
)


def _make(name: str, **changes: Any) -> torch.optim.Optimizer:
    return make_optimizer(parameters(), **({"name": name, "lr": 0.1} | changes))


@pytest.mark.parametrize(
    ("name", "module", "kind"),
    [
        ("sgd", "torch.optim.sgd", "SGD"),
        ("AdamW", "torch.optim.adamw", "AdamW"),
        ("RMSprop", "torch.optim.rmsprop", "RMSprop"),
        ("lars", "lockstep.parallel.layerwise", "Lars"),
        ("LAMB", "lockstep.parallel.layerwise", "Lamb"),
        ("lion", "timm.optim.lion", "Lion"),
    ],
)
def test_classes(name: str, module: str, kind: str) -> None:
    optimizer = _make(name)
    assert (type(optimizer).__module__, type(optimizer).__name__) == (module, kind)


def test_what_is_not_given_stays_at_the_default() -> None:
    reference = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).defaults
    defaults = _make("sgd").defaults
    assert {key for key in reference if reference[key] != defaults[key]} == {"foreach"}


def test_timms_variants_keep_their_settings() -> None:
    assert _make("larc").param_groups[0]["trust_clip"] is True


@pytest.mark.parametrize(
    ("options", "foreach", "fused"),
    [({}, True, None), ({"foreach": False}, False, None), ({"fused": True}, None, True)],
)
def test_form(options: dict[str, bool], foreach: bool | None, fused: bool | None) -> None:
    defaults = _make("sgd", options=options).defaults
    assert (defaults["foreach"], defaults["fused"]) == (foreach, fused)


def test_no_empty_group() -> None:
    optimizer = make_optimizer(parameters()[:1], name="sgd", lr=0.1, weight_decay=0.1, decay_bias_and_norm=False)
    assert [group["param_names"] for group in optimizer.param_groups] == [["weight"]]


def test_frozen_parameters_stay_out() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    [group] = make_optimizer(model.named_parameters(), name="sgd", lr=0.1).param_groups
    assert group["param_names"] == ["weight"]


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(UsageError, match="no parameter that requires a gradient"):
        make_optimizer([], name="sgd", lr=0.1)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "adamw",
            {"momentum": 0.9},
            "optimizer adamw: has no option momentum; valid: betas, eps, weight_decay",
        ),
        ("lamb", {"nesterov": True}, "optimizer lamb: has no option nesterov"),
        ("rprop", {"weight_decay": 0.1}, "optimizer rprop: has no option weight_decay"),
        ("rprop", {"decay_bias_and_norm": False}, "optimizer rprop: has no option weight_decay"),
        ("adamw", {"options": {"beta": 1}}, "has no option beta; did you mean .betas"),
        ("sgd", {"options": {"lr": 1}}, "options contain lr"),
        ("sgd", {"nesterov": True}, "Nesterov momentum requires a momentum.*options passed: nesterov=True"),
        ("adamw", {"options": {"betas": [2.0, 0.9]}}, "Invalid beta"),
        ("sdg", {}, "optimizer sdg: not found in torch.optim or timm.optim; did you mean .*sgd"),
        ("qqqqqqqq", {}, "not found in torch.optim or timm.optim$"),
    ],
)
def test_refuses(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _make(name, **changes)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "lamb"])
def test_check_passes(name: str) -> None:
    check_optimizer(partial(make_optimizer, name=name, lr=0.1), dims=(0, 1, 2, 4))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lbfgs", "LBFGS: a step without a closure failed: .*closure"),
        ("sparseadam", "does not support dense gradients"),
        ("muon", "Muon only supports 2D parameters"),
    ],
)
def test_check_refuses(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_optimizer(partial(make_optimizer, name=name, lr=0.1))


def test_matrices_alone_are_enough_for_muon() -> None:
    check_optimizer(partial(make_optimizer, name="muon", lr=0.1), dims=(2,))


@pytest.mark.slow("starts a Python of its own")
def test_torchs_optimizers_do_not_import_timm() -> None:
    code = (
        "import sys, torch; from lockstep.parallel.optimize import make_optimizer;"
        "make_optimizer([('p', torch.nn.Parameter(torch.ones(1)))], name='adamw', lr=0.1);"
        "assert 'timm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adam", "nadam", "rmsprop", "adagrad", "lion", "lars", "lamb"])
def test_an_element_wise_optimizer_can_update_rows(name: str) -> None:
    assert not needs_full_tensors(partial(make_optimizer, name=name, lr=0.1))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adafactor", {}),
        ("larc", {"weight_decay": 0.1}),
        ("sgd", {"fused": True, "momentum": 0.9}),
        ("muon", {}),
        ("madgrad", {}),  # the ends of its vectors are rounded otherwise
        ("adafactorbv", {}),  # factors large matrices only
        ("adam", {"fused": True}),
    ],
)
def test_other_optimizers_need_whole_tensors_which_some_strategies_lend(name: str, options: dict[str, Any]) -> None:
    make = partial(make_optimizer, name=name, lr=0.1, options=options)
    assert check_row_updates(make, "zero1", lends_wholes=True)
    with pytest.raises(
        UsageError,
        match=r"strategy pipeline: optimizer .* use strategy ddp, zero1, zero2, zero3, hsdp, tensor or expert",
    ):
        check_row_updates(make, "pipeline", lends_wholes=False)


class _CountsItsSteps(torch.optim.Adafactor):
    """Counts in a group, and only if a tensor of the group has a gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + any(each.grad is not None for each in group["params"])
        return super().step(closure)


@pytest.mark.parametrize(
    "make",
    [
        partial(make_optimizer, name="lambc", lr=0.1),  # clips the norm of all gradients
        lambda trained: _CountsItsSteps([tensor for _, tensor in trained]),
    ],
)
def test_an_optimizer_whose_tensors_depend_on_each_other_cannot_have_several_owners(make: Any) -> None:
    with pytest.raises(UsageError, match=r"strategy zero3: optimizer .* depends on tensors that other ranks update"):
        check_row_updates(make, "zero3", lends_wholes=True)


def _options(asked: dict[str, Any]) -> partial[torch.optim.Optimizer]:
    return partial(make_optimizer, lr=0.1, **asked)


@pytest.mark.parametrize(
    "asked",
    [{"name": "sgd", "momentum": 0.9}, {"name": "lars"}, {"name": "lion"}, {"name": "adamw", "options": {"eps": 0.01}}],
)
def test_what_steps_over_any_gradient_in_fp16_may_have_its_weights_there(asked: dict[str, Any]) -> None:
    check_stored_dtype(_options(asked), torch.float16)
    assert not needs_full_tensors(_options(asked), torch.float16)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"name": "adamw"},
            "AdamW: .* a gradient of 0.005 is nan; use an eps of 0.01 or more .*1e-08.* fp16-compute",
        ),
        ({"name": "adam", "options": {"eps": 1e-4}}, "Adam: .* is 50 times the largest in float32; use an eps"),
        ({"name": "lamb"}, "Lamb: .* times the largest in float32"),
    ],
)
def test_what_divides_by_what_fp16_rounds_to_zero_may_not(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_stored_dtype(_options(asked), torch.float16)
    check_stored_dtype(_options(asked), torch.float32)


def test_what_cannot_step_at_all_is_told_so_first() -> None:
    with pytest.raises(UsageError, match="optimizer LBFGS: a step without a closure failed"):
        needs_full_tensors(partial(make_optimizer, name="lbfgs", lr=0.1))


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "adopt"])
def test_the_bare_step_is_torchs_without_its_record(name: str) -> None:
    records, values = [], []
    for bare in (False, True):
        optimizer = _make(name)
        step = unwrap_step(optimizer) if bare else optimizer.step
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 0.5)
        with torch.profiler.profile(acc_events=True) as profiler:
            step()
        records.append(any(event.key.startswith("Optimizer.step") for event in profiler.key_averages()))
        values.append([parameter.detach() for group in optimizer.param_groups for parameter in group["params"]])
    assert records == [True, False]
    assert all(torch.equal(*pair) for pair in zip(*values, strict=True))


def test_the_bare_step_leaves_gradients_as_they_were() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = make_optimizer([("weight", weight)], name="sgd", lr=0.1)
    weight.grad = torch.ones(3)
    unwrap_step(optimizer)()
    assert weight.grad_fn is None
    assert torch.is_grad_enabled()
    with torch.no_grad():
        unwrap_step(optimizer)()
        assert not torch.is_grad_enabled()


def test_the_bare_step_of_a_differentiable_optimizer_has_gradients() -> None:
    weight = nn.Parameter(torch.ones(3))
    options = {"differentiable": True, "foreach": False}
    optimizer = make_optimizer([("weight", weight)], name="sgd", lr=0.1, options=options)
    weight.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="leaf Variable"):  # because gradients are enabled, as somebody asked
        unwrap_step(optimizer)()
    assert torch.is_grad_enabled()


def test_a_bare_step_that_fails_leaves_gradients_enabled() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = make_optimizer([("weight", weight)], name="sgd", lr=0.1)
    weight.grad = torch.ones(3)
    optimizer.param_groups[0]["lr"] = "none"
    with pytest.raises((TypeError, RuntimeError)):
        unwrap_step(optimizer)()
    assert torch.is_grad_enabled()


def test_a_step_that_somebody_put_in_place_of_torchs_is_the_bare_one() -> None:
    optimizer = _make("sgd")
    called: list[str] = []
    optimizer.step = lambda: called.append("mine")  # type: ignore[assignment, misc]
    unwrap_step(optimizer)()
    assert called == ["mine"]


def test_a_group_of_timms_muon_can_fall_back_to_adamw() -> None:
    matrix, table = nn.Parameter(torch.ones(8, 6)), nn.Parameter(torch.ones(9, 6))

    def settings(name: str) -> dict[str, Any]:
        return {"use_fallback": True} if name == "table" else {}

    optimizer = make_optimizer([("matrix", matrix), ("table", table)], name="nmuon", lr=0.1, settings=settings)
    for parameter in (matrix, table):
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    assert "exp_avg_sq" in optimizer.state[table]
    assert "exp_avg_sq" not in optimizer.state[matrix]
    with pytest.raises(UsageError, match="has no option use_fallback"):
        make_optimizer([("table", table)], name="adamw", lr=0.1, settings=settings)
