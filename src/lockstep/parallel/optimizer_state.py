"""An optimizer's state under the names of the model's parameters, instead of torch's running numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors, as `<parameter>/<slot>`, and what is not a tensor, ready for JSON.

    The second part has `slots`, for state that is a number or None, and `groups`, for numbers that some optimizers
    count in their parameter groups; the learning rate is left out, since it follows from the samples seen.
    """
    names = _names(model, optimizer)
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    slots: dict[str, Any] = {}
    for number, values in state["state"].items():
        for slot, value in values.items():
            (tensors if isinstance(value, Tensor) else slots)[f"{names[number]}/{slot}"] = value
    groups = [
        {key: value for key, value in group.items() if key != "lr" and isinstance(value, int | float | None)}
        for group in state["param_groups"]
    ]
    return tensors, {"slots": slots, "groups": groups}


def load_optimizer_state(
    model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]
) -> None:
    """Take over what `optimizer_state` returned."""
    numbers = {name: number for number, name in _names(model, optimizer).items()}
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **scalars["slots"]}.items():
        parameter, _, slot = name.rpartition("/")
        state.setdefault(numbers[parameter], {})[slot] = value
    whole = optimizer.state_dict()
    groups = [{**group, **saved} for group, saved in zip(whole["param_groups"], scalars["groups"], strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _names(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    by_parameter = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {number: by_parameter[parameter] for number, parameter in enumerate(parameters)}
