"""Optimizer state that is keyed by parameter name, instead of by parameter index as in torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

NamedParameter = tuple[str, Parameter]

GROUP_PREFIX: Final = "group "  # can't collide with a parameter name, because parameter names contain no spaces


def get_optimizer_state(
    parameters: Sequence[NamedParameter], optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of an optimizer: the tensors by name, and all other values in JSON-serializable form.

    `parameters` contains the tensors that the optimizer updates. A slot is an entry in the state of a parameter, such
    as `momentum_buffer`. The tensor in a slot is named `<parameter>/<slot>`. Some optimizers also keep tensors in their
    parameter groups. These are named `group <number>/<slot>`. In the second mapping, `slots` contains the slots whose
    value is a number or None, and `groups` contains the same for the parameter groups. The learning rate is excluded,
    because it depends only on the number of samples seen.
    """
    names = _get_names_by_index(parameters, optimizer)
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    slots: dict[str, Any] = {}
    for number, values in state["state"].items():
        for slot, value in values.items():
            (tensors if isinstance(value, Tensor) else slots)[f"{names[number]}/{slot}"] = value
    groups = [{slot: value for slot, value in group.items() if slot != "lr"} for group in state["param_groups"]]
    for number, group in enumerate(groups):
        tensors |= {
            f"{GROUP_PREFIX}{number}/{slot}": value for slot, value in group.items() if isinstance(value, Tensor)
        }
    return tensors, {"slots": slots, "groups": get_group_numbers(groups)}


def get_group_numbers(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the numbers and None values in each parameter group, except for the learning rate."""
    groups_without_lr = [{slot: value for slot, value in group.items() if slot != "lr"} for group in groups]
    return [
        {slot: value for slot, value in group.items() if isinstance(value, int | float | None)}
        for group in groups_without_lr
    ]


def load_optimizer_state(
    parameters: Sequence[NamedParameter],
    optimizer: Optimizer,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
) -> None:
    """Load an optimizer state from `tensors` and `scalars`, as returned by `get_optimizer_state`."""
    state_dict = optimizer.state_dict()
    groups = [{**group, **saved} for group, saved in zip(state_dict["param_groups"], scalars["groups"], strict=True)]
    number_by_name = {name: number for number, name in _get_names_by_index(parameters, optimizer).items()}
    by_name = dict(parameters)
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **scalars["slots"]}.items():
        owner, _, slot = name.rpartition("/")
        if owner.startswith(GROUP_PREFIX):
            groups[int(owner.removeprefix(GROUP_PREFIX))][slot] = value
        else:
            state.setdefault(number_by_name[owner], {})[slot] = _match_memory_format(value, by_name[owner])
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for name, parameter in parameters:
        if (number := number_by_name.get(name)) in state:
            _restore_dtypes(optimizer.state[parameter], state[number])


def _restore_dtypes(loaded: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Restore tensors that torch converted to the dtype of their parameter on load, such as `mu_product` in NAdam."""
    for slot, value in saved.items():
        converted = loaded.get(slot)
        if isinstance(value, Tensor) and isinstance(converted, Tensor) and converted.dtype is not value.dtype:
            loaded[slot] = value.to(converted.device, copy=True)


def _match_memory_format(value: Any, parameter: Tensor) -> Any:
    """Return `value` in the memory format of `parameter` if both have the same shape, or unchanged otherwise.

    The memory format affects the bits, because the norms of LAMB are summed in memory order.
    """
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value


def _get_names_by_index(parameters: Sequence[NamedParameter], optimizer: Optimizer) -> dict[int, str]:
    by_parameter = {parameter: name for name, parameter in parameters}
    optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {number: by_parameter[parameter] for number, parameter in enumerate(optimized)}
