"""Optimizers by name: torch's, timm's and the user's own, with every choice that changes bits made here."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import MethodType
from typing import Any, Final, cast

import torch
from torch.optim import Optimizer

from lockstep.common.importing import import_callable
from lockstep.common.names import choices, suggestion
from lockstep.common.own_code import OwnCode
from lockstep.errors import UsageError, error_as
from lockstep.parallel.groups import SCALE
from lockstep.parallel.layerwise import Lamb, Lars, Norms, whole_norms
from lockstep.parallel.optimizer_state import Named

Factory = Callable[..., Optimizer]
Settings = Callable[[str], Mapping[str, Any]]  # of a parameter, by its name

CONTRACT: Final = "see docs/extend.md"
# Ours, whatever torch or timm has or will have of these names.
OURS: Final[Mapping[str, type[Optimizer]]] = {"lars": Lars, "lamb": Lamb}
_GIVEN: Final = ("params", "lr", "norms")  # what an optimizer takes that is none of its options


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
    norms: Norms = whole_norms,
    settings: Settings | None = None,
) -> Optimizer:
    """Return the optimizer `name` over the parameters that want a gradient; its groups keep their names.

    `lars` and `lamb` are ours (parallel/layerwise.py), and take the norms of whole tensors from `norms`; any other name
    is looked for in torch.optim, whatever its case, then in timm; `package.module:Class` is the user's. What is None
    stays at the optimizer's default. With `decay_bias_and_norm` false, parameters of at most one dim are a group of
    their own, without weight decay. `settings` gives options of single parameters, which win over all others.

    The multi-tensor form ("foreach") is taken wherever there is one and the fused form nowhere, unless `options` say
    otherwise: the forms differ in bits, so torch must not choose by device. Torch's fused form for the CPU even gives
    other bits to an element at the end of a tensor than in its middle, so not to the rows of a cut one.
    """
    factory = _find_own(name) if ":" in name else find_optimizer(name)
    values = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    asked = {key: value for key, value in values.items() if value is not None} | dict(options or {})
    taken = _argument_names(factory)
    _check_options(name, taken, asked, decay_bias_and_norm)
    form: dict[str, Any] = {"foreach": True} if "foreach" in (taken or ()) and not asked.get("fused") else {}
    if name.lower() in OURS:
        form = {"norms": norms}
    groups = _groups(name, parameters, decay_bias_and_norm, settings or (lambda _: {}))
    own = {key: None for group in groups for key in group if key not in ("params", SCALE)}  # a scale is ours to apply
    _check_options(f"{name}, recipe.optimizer.groups", taken, own, True)
    if ":" in name:
        made = _call_factory(name, factory, groups, {"lr": lr, **form, **asked})
        _check_kept(name, groups, made)
        return made
    try:
        return factory(groups, **{"lr": lr, **form, **asked})
    except (TypeError, ValueError, RuntimeError) as error:
        given = ", ".join(f"{key}={value}" for key, value in asked.items()) or "nothing"
        raise UsageError(f"optimizer {name}: {error}; given: {given}") from error


def bare_step(optimizer: Optimizer) -> Callable[[], object]:
    """Return the step of `optimizer` without what torch wraps around it: a record for its profiler, and step hooks.

    That record is made whether anybody profiles or not, and takes longer than the update of a small model. An optimizer
    that torch has not wrapped, or that has been given a step of its own, is returned its step as it is.
    """
    step = type(optimizer).step
    if "step" in vars(optimizer) or not getattr(step, "hooked", False):
        return cast(Callable[[], object], optimizer.step)
    return MethodType(cast(Any, step).__wrapped__, optimizer)


def _find_own(path: str) -> Callable[..., Any]:
    """Return the user's class or function; UsageError where it is neither, or takes no rate."""
    factory = import_callable(path, "optimizer", "a class or a function")
    taken = _argument_names(factory)
    if taken is not None and "lr" not in taken:
        raise UsageError(f"optimizer {path}: it takes no lr; let it be (params, lr, ...) ({CONTRACT})")
    return cast(Callable[..., Any], factory)


def _argument_names(factory: Callable[..., Any]) -> list[str] | None:
    """Return the names of all that a class or a function takes, None where it takes anything."""
    cls = factory.func if isinstance(factory, partial) else factory
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # of C
        return None
    return None if any(each.kind is each.VAR_KEYWORD for each in parameters.values()) else [*parameters]


def _call_factory(
    path: str, factory: Callable[..., Any], groups: Sequence[Mapping[str, Any]], asked: Mapping[str, Any]
) -> Optimizer:
    """Call the user's class or function with groups of named parameters and `asked`, which has `lr`.

    UsageError where it returns no optimizer over all of the parameters, and nothing else.
    """
    with OwnCode(f"optimizer {path}"):
        made = factory([dict(group) for group in groups], **asked)
    if not isinstance(made, Optimizer):
        raise UsageError(f"optimizer {path}: it gives {type(made).__name__}; return a torch.optim.Optimizer")
    given = {id(parameter): name for group in groups for name, parameter in group["params"]}
    moved = [id(parameter) for group in made.param_groups for parameter in group["params"]]
    if left := [name for key, name in given.items() if key not in moved]:
        raise UsageError(f"optimizer {path}: it leaves out {', '.join(left[:3])}; let it take all that it is given")
    if len(moved) > len(given):
        raise UsageError(f"optimizer {path}: it moves tensors that it was not given; let it take those it is given")
    if any("lr" not in each for each in (made.defaults, *made.param_groups)):
        raise UsageError(f"optimizer {path}: it has no 'lr' in its defaults, where the schedule sets it ({CONTRACT})")
    return made


def find_optimizer(name: str) -> Factory:
    """Return ours, torch's or timm's of that name; UsageError where there is none."""
    lower = name.lower()
    if lower in OURS:
        return OURS[lower]
    from_torch = _torch_optimizers()
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
    with error_as(UsageError, (AssertionError, ImportError), f"optimizer {name}: it cannot be used here"):
        factory: Factory = optim.get_optimizer_class(name.lower(), bind_defaults=True)
    return factory


def _check_options(name: str, taken: Sequence[str] | None, asked: Iterable[str], decay_bias_and_norm: bool) -> None:
    keys = [*asked] if decay_bias_and_norm else [*asked, "weight_decay"]
    options = [each for each in taken or () if each not in _GIVEN]
    for key in keys:
        if key == "lr":
            raise UsageError(f"optimizer {name}: lr stands among its options; set optimizer.lr instead")
        if taken is not None and key not in options:
            raise UsageError(f"optimizer {name}: it has no {key}{choices(key, options)}")


def _groups(
    name: str, parameters: Iterable[Named], decay_bias_and_norm: bool, settings: Settings
) -> list[dict[str, Any]]:
    """Return a group for all parameters with the same options; first those that the rule for biases leaves alone."""
    trained = [(key, parameter) for key, parameter in parameters if parameter.requires_grad]
    if not trained:
        raise UsageError(f"optimizer {name}: the model has no parameter that wants a gradient")
    groups: dict[str, dict[str, Any]] = {}
    for exempt in (False, True):
        for key, parameter in trained:
            if exempt != (not decay_bias_and_norm and parameter.ndim <= 1):
                continue
            own = {**({"weight_decay": 0.0} if exempt else {}), **settings(key)}
            group = groups.setdefault(f"{exempt} {sorted(own.items())}", {**own, "params": []})
            group["params"].append((key, parameter))
    return list(groups.values())


def _check_kept(name: str, groups: Iterable[Mapping[str, Any]], made: Optimizer) -> None:
    """Raise UsageError where an optimizer of the user's own forgot what a group was given beside its parameters."""
    group_of = {id(each): group for group in made.param_groups for each in group["params"]}
    for group in groups:
        for option in (option for option in group if option != "params"):
            if any(group_of[id(each)].get(option) != group[option] for _, each in group["params"]):
                raise UsageError(
                    f"optimizer {name}: it drops {option} of its parameter groups; hand the groups that it is given "
                    f"to torch.optim.Optimizer as they are"
                )
