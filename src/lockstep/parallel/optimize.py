"""Optimizers by name: torch's and timm's, with every choice that changes bits made here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final, cast

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.core.names import choices, suggestion
from lockstep.errors import UsageError

Named = tuple[str, Parameter]
Factory = Callable[..., Optimizer]

# Looked for in timm first, so that a torch which adds one of that name does not change a recipe.
_TIMM_FIRST: Final = frozenset({"lars", "lamb"})


def make_optimizer(
    parameters: Iterable[Named],
    *,
    name: str,
    lr: float,
    momentum: float | None = None,
    nesterov: bool | None = None,
    weight_decay: float | None = None,
    decay_bias_and_norm: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Optimizer:
    """Return the optimizer `name` over the parameters that want a gradient; its groups keep their names.

    `lars` and `lamb` are timm's; any other name is looked for in torch.optim, whatever its case, then in
    timm. What is None stays at the optimizer's default. With `decay_bias_and_norm` false, parameters of at
    most one dim are a group of their own, without weight decay.

    The multi-tensor form ("foreach") is taken wherever there is one and the fused form nowhere, unless
    `options` say otherwise: the forms differ in bits, so torch must not choose by device.
    """
    factory = _find(name)
    values = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    asked = {key: value for key, value in values.items() if value is not None} | dict(options or {})
    accepted = _accepted(factory)
    _check_asked(name, accepted, asked, decay_bias_and_norm)
    form = {"foreach": True} if "foreach" in accepted and not asked.get("fused") else {}
    groups = _groups(name, parameters, decay_bias_and_norm)
    try:
        return factory(groups, **{"lr": lr, **form, **asked})
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"optimizer {name}: {error}; given: {_listing(asked)}") from error


def check_optimizer(make: Callable[[Iterable[Named]], Optimizer], dims: Iterable[int] = (1, 2)) -> None:
    """Raise UsageError where `make` does, or where the optimizer it returns cannot take a plain step.

    It steps over tiny parameters of so many `dims`, before any process is started, and so finds an optimizer
    that wants a closure, second derivatives, sparse gradients or none but matrices, or that keeps what no
    checkpoint holds.
    """
    optimizer = make([(f"parameter{dim}", _tiny(dim)) for dim in sorted(set(dims))])
    name = type(optimizer).__name__
    try:
        cast(Callable[[], object], optimizer.step)()
    except Exception as error:  # whatever it is, it would come at the first step of training too
        raise UsageError(f"optimizer {name}: it cannot take a plain step: {error}; use another") from error
    for slot, value in ((slot, value) for values in optimizer.state.values() for slot, value in values.items()):
        if not isinstance(value, torch.Tensor | int | float | None):
            found = type(value).__name__
            raise UsageError(
                f"optimizer {name}: it keeps a {found} as '{slot}', which no checkpoint holds; use another"
            )


def _find(name: str) -> Factory:
    lower = name.lower()
    from_torch = {} if lower in _TIMM_FIRST else _torch_optimizers()
    return from_torch[lower] if lower in from_torch else _timm_optimizer(name)


def _torch_optimizers() -> dict[str, Factory]:
    members = inspect.getmembers(torch.optim, inspect.isclass)
    return {
        name.lower(): member for name, member in members if issubclass(member, Optimizer) and member is not Optimizer
    }


def _timm_optimizer(name: str) -> Factory:
    optim: Any = import_module("timm.optim")  # here, because it takes seconds
    if name.lower() not in optim.list_optimizers():
        hint = suggestion(name, [*_torch_optimizers(), *optim.list_optimizers()])
        raise UsageError(f"optimizer {name}: neither torch.optim nor timm.optim has it{hint}")
    try:
        factory: Factory = optim.get_optimizer_class(name.lower(), bind_defaults=True)
    except (AssertionError, ImportError) as error:
        raise UsageError(f"optimizer {name}: it cannot be used here: {error}") from error
    return factory


def _accepted(factory: Factory) -> list[str]:
    cls = factory.func if isinstance(factory, partial) else factory
    return [name for name in inspect.signature(cls).parameters if name not in ("params", "lr")]


def _check_asked(name: str, accepted: Sequence[str], asked: Iterable[str], decay_bias_and_norm: bool) -> None:
    keys = [*asked] if decay_bias_and_norm else [*asked, "weight_decay"]
    for key in keys:
        if key == "lr":
            raise UsageError(f"optimizer {name}: lr stands among its options; set optimizer.lr instead")
        if key not in accepted:
            raise UsageError(f"optimizer {name}: it has no {key}{choices(key, accepted)}")


def _groups(name: str, parameters: Iterable[Named], decay_bias_and_norm: bool) -> list[dict[str, Any]]:
    trained = [(key, parameter) for key, parameter in parameters if parameter.requires_grad]
    if not trained:
        raise UsageError(f"optimizer {name}: the model has no parameter that wants a gradient")
    if decay_bias_and_norm:
        return [{"params": trained}]
    decayed = [(key, parameter) for key, parameter in trained if parameter.ndim > 1]
    others = [(key, parameter) for key, parameter in trained if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _tiny(dim: int) -> Parameter:
    parameter = Parameter(torch.ones((2,) * dim))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def _listing(asked: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in asked.items()) or "nothing"
