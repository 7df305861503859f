"""The state of an optimizer goes through names and JSON and back without the loss of a bit."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.errors import UsageError
from lockstep.parallel.optimize import make_optimizer
from lockstep.parallel.optimizer_state import get_optimizer_state, load_optimizer_state
from lockstep.parallel.optimizer_trials import check_optimizer

NAMES = [
    *("sgd", "adam", "adamw", "adamax", "nadam", "radam", "rmsprop", "adagrad", "rprop", "asgd", "adafactor"),
    *("lamb", "lars", "lambc", "madgrad", "adopt", "lion"),
]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def _make(name: str, model: nn.Module, decay_bias_and_norm: bool = False) -> Optimizer:
    options = {"momentum": 0.9} if name in ("sgd", "lars") else {}
    decays = name != "rprop"
    return make_optimizer(
        model.named_parameters(),
        name=name,
        lr=0.01,
        weight_decay=0.1 if decays else None,
        decay_bias_and_norm=decay_bias_and_norm or not decays,
        **options,  # type: ignore[arg-type]
    )


def _train(model: nn.Module, optimizer: Optimizer, numbers: range) -> None:
    dtype = next(model.parameters()).dtype
    for number in numbers:
        torch.manual_seed(number)
        model(torch.randn(5, 6).to(dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_going_on_from_a_state_is_going_on(name: str, dtype: torch.dtype) -> None:
    """Of float64 parameters NAdam keeps a slot in float32, which torch's `load_state_dict` converts."""
    whole, half, rest = (_model().to(dtype) for _ in range(3))
    _train(whole, _make(name, whole), range(6))
    first = _make(name, half)
    _train(half, first, range(3))
    tensors, scalars = get_optimizer_state([*half.named_parameters()], first)
    assert all(isinstance(tensor, Tensor) for tensor in tensors.values())
    copied = {key: tensor.clone() for key, tensor in tensors.items()}
    rest.load_state_dict(half.state_dict())
    second = _make(name, rest)
    load_optimizer_state([*rest.named_parameters()], second, copied, json.loads(json.dumps(scalars)))
    _train(rest, second, range(3, 6))
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), rest.parameters(), strict=True))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_names_are_the_models_whatever_the_groups(name: str) -> None:
    """With groups, torch numbers matrices before vectors; a name stays with its parameter."""
    models = _model(), _model()
    states = []
    for model, together in zip(models, (True, False), strict=True):
        optimizer = _make(name, model, decay_bias_and_norm=together)
        _train(model, optimizer, range(1))
        states.append(get_optimizer_state([*model.named_parameters()], optimizer)[0])
    assert states[0].keys() == states[1].keys()
    shapes = {key: parameter.shape for key, parameter in models[0].named_parameters()}
    for key, tensor in states[1].items():
        parameter, _, slot = key.rpartition("/")
        assert slot == "step" or tensor.shape == shapes[parameter]


def test_golden_names() -> None:
    model = nn.Linear(2, 1)
    optimizer = make_optimizer(model.named_parameters(), name="adamw", lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tensors, scalars = get_optimizer_state([*model.named_parameters()], optimizer)
    assert sorted(tensors) == [
        f"{name}/{slot}" for name in ("bias", "weight") for slot in ("exp_avg", "exp_avg_sq", "step")
    ]
    assert scalars["slots"] == {}
    assert scalars["groups"][0]["weight_decay"] == 0.01
    assert "lr" not in scalars["groups"][0]


def test_what_an_optimizer_counts_for_a_group_is_kept() -> None:
    model = _model()
    optimizer = _make("lambc", model)  # timm's
    _train(model, optimizer, range(3))
    tensors, _ = get_optimizer_state([*model.named_parameters()], optimizer)
    assert [tensors[f"group {number}/step"].item() for number in range(2)] == [3, 3]


def test_the_learning_rate_is_not_the_states() -> None:
    model = _model()
    optimizer = _make("sgd", model)
    _train(model, optimizer, range(1))
    state = get_optimizer_state([*model.named_parameters()], optimizer)
    other = make_optimizer(model.named_parameters(), name="sgd", lr=3.0, momentum=0.9, decay_bias_and_norm=False)
    load_optimizer_state([*model.named_parameters()], other, *state)
    assert [group["lr"] for group in other.param_groups] == [3.0, 3.0]
    assert other.param_groups[0]["weight_decay"] == 0.1


def test_moments_lie_as_their_parameters_do() -> None:
    """A file's tensors are contiguous; LAMB's norms would add up in another order."""
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = _make("lamb", model)
    model(torch.ones(1, 3, 3, 3)).sum().backward()
    optimizer.step()
    tensors, scalars = get_optimizer_state([*model.named_parameters()], optimizer)
    moment = tensors["weight/exp_avg"]
    assert moment.stride() == model.weight.stride() != moment.contiguous().stride()
    load_optimizer_state(
        [*model.named_parameters()], optimizer, {key: tensor.contiguous() for key, tensor in tensors.items()}, scalars
    )
    loaded = get_optimizer_state([*model.named_parameters()], optimizer)[0]["weight/exp_avg"]
    assert loaded.stride() == model.weight.stride()
    assert torch.equal(loaded, moment)


def test_an_untrained_optimizer_has_a_state() -> None:
    model = _model()
    optimizer = _make("adamw", model)
    tensors, scalars = get_optimizer_state([*model.named_parameters()], optimizer)
    assert tensors == {}
    load_optimizer_state([*model.named_parameters()], optimizer, tensors, scalars)


class InBits(torch.Tensor):
    """Stands for a tensor that is made of several, as those of 8-bit optimizers are."""


class Hoarder(Optimizer):
    """Keeps something for each parameter; its state_dict may show that in a mapping, as bitsandbytes does."""

    def __init__(self, params: Iterable[tuple[str, Parameter]], kept: Any, nested: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self._kept, self._nested = kept, nested

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["moment"] = self._kept

    def state_dict(self) -> dict[str, object]:
        shown = super().state_dict()
        nested = {key: {"quantized": each} for key, each in shown["state"].items()}
        return {**shown, "state": nested} if self._nested else shown


@pytest.mark.parametrize(
    ("kept", "nested", "what"),
    [
        ([torch.zeros(2)], False, "'moment' is a list"),
        (torch.zeros(2), True, "'quantized' is a dict"),
        (torch.zeros(2).as_subclass(InBits), False, "'moment' is a InBits"),  # as torchao has
    ],
)
def test_a_state_that_no_checkpoint_holds_is_refused_before_training(kept: Any, nested: bool, what: str) -> None:
    with pytest.raises(UsageError, match=f"optimizer Hoarder: its state {what}, which a checkpoint cannot store"):
        check_optimizer(partial(Hoarder, kept=kept, nested=nested))
