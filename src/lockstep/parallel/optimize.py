"""Creates optimizers from torch, timm or your own code by name, and sets all options that affect the bits."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import MethodType
from typing import Any, Final, cast

import torch
from torch.optim import Optimizer

from lockstep.common.importing import import_callable
from lockstep.common.names import format_choices, format_suggestion
from lockstep.common.user_code import UserCode
from lockstep.errors import UsageError, convert_error
from lockstep.parallel.groups import SCALE
from lockstep.parallel.layerwise import ComputeNorms, Lamb, Lars, compute_full_norms
from lockstep.parallel.optimizer_state import NamedParameter

OptimizerFactory = Callable[..., Optimizer]
GetParameterOptions = Callable[[str], Mapping[str, Any]]  # returns the optimizer options of a parameter, given its name

CONTRACT: Final = "see docs/extend.md"
# Lockstep's own optimizers. They take precedence over optimizers of torch or timm with the same name.
OWN_OPTIMIZERS: Final[Mapping[str, type[Optimizer]]] = {"lars": Lars, "lamb": Lamb}
_GRAD_WRAPPER: Final = "_use_grad"  # the function that torch wraps the `step` of most optimizers in
_NON_OPTIONS: Final = ("params", "lr", "norms")  # constructor arguments that aren't options


def make_optimizer(
    parameters: Iterable[NamedParameter],
    *,
    name: str,
    lr: float,
    momentum: float | None = None,
    nesterov: bool | None = None,
    weight_decay: float | None = None,
    decay_bias_and_norm: bool = True,
    options: Mapping[str, Any] | None = None,
    norms: ComputeNorms = compute_full_norms,
    settings: GetParameterOptions | None = None,
) -> Optimizer:
    """Create the optimizer `name` for the parameters that require a gradient. Its groups contain parameter names.

    `lars` and `lamb` are part of Lockstep (parallel/layerwise.py), and use `norms` for the norms of full tensors. Any
    other name is looked up in torch.optim, ignoring case, and then in timm. Use `package.module:Class` for your own
    class. Arguments that are None keep the optimizer's default. With `decay_bias_and_norm=False`, parameters with at
    most one dim are in separate groups without weight decay. `settings` returns options for individual parameters,
    which override all other options.

    By default, an optimizer uses its multi-tensor implementation ("foreach") if it has one, and never its fused
    implementation. To change this, set `foreach` or `fused` in `options`. The implementations compute different bits,
    so torch must not select one by device. In addition, torch's fused implementation for the CPU computes different
    bits at the end of a tensor than in the middle, so rows of a sharded tensor would get different bits.
    """
    factory = find_factory(name)
    values = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    options_set = {key: value for key, value in values.items() if value is not None} | dict(options or {})
    argument_names = _get_argument_names(factory)
    _check_options(name, argument_names, options_set, decay_bias_and_norm)
    extra_arguments: dict[str, Any] = (
        {"foreach": True} if "foreach" in (argument_names or ()) and not options_set.get("fused") else {}
    )
    if name.lower() in OWN_OPTIMIZERS:
        extra_arguments = {"norms": norms}
    groups = _make_groups(name, parameters, decay_bias_and_norm, settings or (lambda _: {}))
    # `lr_scale` isn't an option of the optimizer: Lockstep applies it.
    group_options = {key: None for group in groups for key in group if key not in ("params", SCALE)}
    group_names = argument_names
    if argument_names is not None and "fallback_lr_scale" in argument_names:
        # timm's Muon uses AdamW for groups with `use_fallback`, which is a group option, but not an argument.
        group_names = [*argument_names, "use_fallback"]
    _check_options(f"{name}, recipe.optimizer.groups", group_names, group_options, True)
    if ":" in name:
        optimizer = _call_factory(name, factory, groups, {"lr": lr, **extra_arguments, **options_set})
        _check_options_kept(name, groups, optimizer)
        return optimizer
    try:
        return factory(groups, **{"lr": lr, **extra_arguments, **options_set})
    except (TypeError, ValueError, RuntimeError) as error:
        options_text = ", ".join(f"{key}={value}" for key, value in options_set.items()) or "nothing"
        raise UsageError(f"optimizer {name}: {error} (options passed: {options_text}); change its options") from error


def unwrap_step(optimizer: Optimizer) -> Callable[[], object]:
    """Return the `step` method of `optimizer` without torch's wrappers.

    The outer wrapper creates a profiler record and calls hooks. Even without a profiler, creating the record takes
    longer than the update of a small model. The inner wrapper disables gradients, unless the optimizer is
    `differentiable`. It's replaced with a call that takes 4 us less. If torch hasn't wrapped `step`, or if the instance
    overrides it, this returns `step` unchanged.
    """
    step = type(optimizer).step
    if "step" in vars(optimizer) or not getattr(step, "hooked", False):
        return cast(Callable[[], object], optimizer.step)
    step = cast(Any, step).__wrapped__
    inner_step = getattr(step, "__wrapped__", None)
    if inner_step is None or step.__code__.co_name != _GRAD_WRAPPER or optimizer.defaults["differentiable"]:
        return MethodType(step, optimizer)
    return partial(_step_without_grad, MethodType(inner_step, optimizer))


def _step_without_grad(step: Callable[[], object]) -> None:
    """Call `step` with gradients disabled. Creating a torch.no_grad() would take longer than the rest of this call."""
    was_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        step()
    finally:
        torch._C._set_grad_enabled(was_enabled)


def _import_custom_factory(path: str) -> Callable[..., Any]:
    """Import the custom class or function `path`.

    Raises UsageError if it is neither a class nor a function, or if it has no argument `lr`.
    """
    factory = import_callable(path, "optimizer", "a class or a function")
    argument_names = _get_argument_names(factory)
    if argument_names is not None and "lr" not in argument_names:
        raise UsageError(f"optimizer {path}: has no argument lr; use the arguments (params, lr, ...) ({CONTRACT})")
    return cast(Callable[..., Any], factory)


def _get_argument_names(factory: Callable[..., Any]) -> list[str] | None:
    """Return the argument names of a class or function, or None if they are unknown or if it accepts **kwargs."""
    cls = factory.func if isinstance(factory, partial) else factory
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # implemented in C
        return None
    return None if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()) else [*parameters]


def _call_factory(
    path: str, factory: Callable[..., Any], groups: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> Optimizer:
    """Create an optimizer by calling `factory`, a custom class or function, with `groups` and `arguments`.

    The groups contain named parameters, and the arguments contain `lr`. Raises UsageError unless `factory` returns an
    optimizer for exactly these parameters.
    """
    with UserCode(f"optimizer {path}"):
        optimizer = factory([dict(group) for group in groups], **arguments)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer {path}: returned a {type(optimizer).__name__}; return a torch.optim.Optimizer")
    names_by_id = {id(parameter): name for group in groups for name, parameter in group["params"]}
    optimized_ids = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if missing := [name for key, name in names_by_id.items() if key not in optimized_ids]:
        raise UsageError(
            f"optimizer {path}: its groups do not contain {', '.join(missing[:3])}; add all parameters that are passed "
            f"to the optimizer"
        )
    if len(optimized_ids) > len(names_by_id):
        raise UsageError(
            f"optimizer {path}: its groups contain tensors that were not passed to it; add only the parameters that "
            f"are passed to the optimizer"
        )
    if any("lr" not in group for group in (optimizer.defaults, *optimizer.param_groups)):
        raise UsageError(
            f"optimizer {path}: its defaults or groups do not contain 'lr', which the schedule sets; include lr in the "
            f"defaults that you pass to torch.optim.Optimizer ({CONTRACT})"
        )
    return optimizer


def find_factory(name: str) -> OptimizerFactory:
    """Return the optimizer class or function with this name or import path. Raises UsageError if there is none."""
    return _import_custom_factory(name) if ":" in name else find_optimizer(name)


def find_optimizer(name: str) -> OptimizerFactory:
    """Return the optimizer class with this name from Lockstep, torch or timm. Raises UsageError if there is none."""
    lower = name.lower()
    if lower in OWN_OPTIMIZERS:
        return OWN_OPTIMIZERS[lower]
    from_torch = _list_torch_optimizers()
    return from_torch[lower] if lower in from_torch else _find_timm_optimizer(name)


def _list_torch_optimizers() -> dict[str, OptimizerFactory]:
    members = inspect.getmembers(torch.optim, inspect.isclass)
    return {
        name.lower(): member for name, member in members if issubclass(member, Optimizer) and member is not Optimizer
    }


def _find_timm_optimizer(name: str) -> OptimizerFactory:
    optim: Any = import_module("timm.optim")  # imported lazily, because it takes seconds
    if name.lower() not in optim.list_optimizers():
        hint = format_suggestion(name, [*_list_torch_optimizers(), *optim.list_optimizers()])
        raise UsageError(f"optimizer {name}: not found in torch.optim or timm.optim{hint}")
    with convert_error(UsageError, (AssertionError, ImportError), f"optimizer {name}: cannot be used here"):
        factory: OptimizerFactory = optim.get_optimizer_class(name.lower(), bind_defaults=True)
    return factory


def _check_options(
    optimizer_name: str,
    argument_names: Sequence[str] | None,
    requested_options: Iterable[str],
    decay_bias_and_norm: bool,
) -> None:
    keys = [*requested_options] if decay_bias_and_norm else [*requested_options, "weight_decay"]
    options = [argument for argument in argument_names or () if argument not in _NON_OPTIONS]
    for key in keys:
        if key == "lr":
            raise UsageError(f"optimizer {optimizer_name}: options contain lr; set recipe.optimizer.lr instead")
        if argument_names is not None and key not in options:
            raise UsageError(f"optimizer {optimizer_name}: has no option {key}{format_choices(key, options)}")


def _make_groups(
    name: str, parameters: Iterable[NamedParameter], decay_bias_and_norm: bool, settings: GetParameterOptions
) -> list[dict[str, Any]]:
    """Return one parameter group for each distinct set of options. Groups without weight decay come last."""
    trained = [(parameter_name, parameter) for parameter_name, parameter in parameters if parameter.requires_grad]
    if not trained:
        raise UsageError(
            f"optimizer {name}: the model has no parameter that requires a gradient; set requires_grad=True on the "
            f"parameters to train"
        )
    groups: dict[str, dict[str, Any]] = {}
    for exempt in (False, True):
        for parameter_name, parameter in trained:
            if exempt != (not decay_bias_and_norm and parameter.ndim <= 1):
                continue
            group_options = {**({"weight_decay": 0.0} if exempt else {}), **settings(parameter_name)}
            group = groups.setdefault(f"{exempt} {sorted(group_options.items())}", {**group_options, "params": []})
            group["params"].append((parameter_name, parameter))
    return list(groups.values())


def _check_options_kept(name: str, groups: Iterable[Mapping[str, Any]], optimizer: Optimizer) -> None:
    """Raise UsageError if a custom optimizer dropped or changed an option of a parameter group."""
    group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for group in groups:
        for option in (option for option in group if option != "params"):
            if any(group_of[id(parameter)].get(option) != group[option] for _, parameter in group["params"]):
                raise UsageError(
                    f"optimizer {name}: drops option {option} of its parameter groups; pass the groups unchanged to "
                    f"torch.optim.Optimizer"
                )
