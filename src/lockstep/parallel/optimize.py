"""Optimizers by name: torch's, timm's and the user's own, with every choice that changes bits made here."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from types import MethodType
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.common.names import choices, suggestion
from lockstep.common.own_code import own_error
from lockstep.errors import UsageError
from lockstep.parallel.groups import SCALE
from lockstep.parallel.layerwise import Lamb, Lars, Norms, whole_norms
from lockstep.parallel.narrow_steps import AlikeInRows
from lockstep.parallel.own_optimizer import accepted, find_own, made_by

Named = tuple[str, Parameter]
Factory = Callable[..., Optimizer]
Settings = Callable[[str], Mapping[str, Any]]  # of a parameter, by its name

# Ours, whatever torch or timm has or will have of these names.
_OURS: Final[Mapping[str, type[Optimizer]]] = {"lars": Lars, "lamb": Lamb}
_GIVEN: Final = ("params", "lr", "norms")  # what an optimizer takes that is none of its options

# To be cut: most neither fill whole vectors of a CPU nor have parts that do; some are large enough to be factored.
_SHAPES: Final = ((13, 37), (33, 5), (130,), (1025,), (64, 64), (64, 3, 3, 3))


_SIZES: Final = (1.0, 0.1, 1e-2, 5e-3, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 0.0)  # of gradients, to be tried in 16 bits
_STEPS: Final = 3


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
    factory = find_own(name) if ":" in name else _find(name)
    values = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    asked = {key: value for key, value in values.items() if value is not None} | dict(options or {})
    taken = accepted(factory)
    _check_asked(name, taken, asked, decay_bias_and_norm)
    form: dict[str, Any] = {"foreach": True} if "foreach" in (taken or ()) and not asked.get("fused") else {}
    if name.lower() in _OURS:
        form = {"norms": norms}
    groups = _groups(name, parameters, decay_bias_and_norm, settings or _nothing)
    _check_asked(f"{name}, recipe.optimizer.groups", taken, _asked_of(groups), True)
    if ":" in name:
        made = made_by(name, factory, groups, {"lr": lr, **form, **asked})
        _check_kept(name, groups, made)
        return made
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
        told = own_error(error) or f"{error}; use another"
        raise UsageError(f"optimizer {name}: it cannot take a plain step: {told}") from error
    kept = cast(dict[int, dict[str, Any]], optimizer.state_dict()["state"])
    for slot, value in ((slot, value) for values in kept.values() for slot, value in values.items()):
        # A tensor of a class of its own, such as one in 8 bits and its scales, is more than a file of tensors holds.
        if not isinstance(value, int | float | None) and type(value) not in (Tensor, Parameter):
            found = type(value).__name__
            raise UsageError(
                f"optimizer {name}: it keeps a {found} as '{slot}', which no checkpoint holds; use another"
            )


def check_rows(make: Callable[[Iterable[Named]], Optimizer], strategy: str, dtype: torch.dtype | None = None) -> None:
    """Raise UsageError where check_optimizer does, or an optimizer does not do to rows what it does to a whole tensor.

    It is tried on some shapes, cut unevenly, in `dtype` where weights are trained in that. Those of
    parallel/layerwise.py are told the norms of the whole, so they pass. Fused forms do not: where their vectors end
    decides bits, but not for all numbers, so no trial would be sure.
    """
    check_optimizer(make, dims=(2,))
    optimizer = make([("parameter", _tiny(2))])
    if type(optimizer) in _OURS.values():
        return
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused or not all(_alike_in_rows(make, shape, dtype) for shape in _SHAPES):
        raise UsageError(
            f"strategy {strategy}: optimizer {type(optimizer).__name__} treats rows of a tensor otherwise than the "
            f"whole tensor, so it cannot be cut; use strategy ddp, or an optimizer such as sgd, adamw, lars or lamb "
            f"without fused=true"
        )


def check_stored(make: Callable[[Iterable[Named]], Optimizer], dtype: torch.dtype) -> None:
    """Raise UsageError where an optimizer whose weights and state are in `dtype` steps otherwise than in float32.

    It steps over gradients of all sizes, from 1 down to 0. What is asked of each of its steps is little: that it be
    finite, and at most twice as long as the longest in float32. Adam's are not: what is added to the root of its second
    moment, so that nothing is divided by zero, is zero in float16.
    """
    optimizer = make([("parameter", _tiny(2))])
    wide, narrow = (_longest_steps(make, each) for each in (torch.float32, dtype))
    for size, longest in zip(_SIZES, narrow.tolist(), strict=True):
        if math.isfinite(longest) and longest <= 2 * float(wide.max()):
            continue
        name = str(dtype).removeprefix("torch.")
        much = f"{longest / float(wide.max()):.3g} times the longest in float32" if math.isfinite(longest) else longest
        eps = next((group["eps"] for group in optimizer.param_groups if "eps" in group), None)
        larger = "" if eps is None else f"an eps of 0.01 or more in its options (it is {eps}), "
        raise UsageError(
            f"optimizer {type(optimizer).__name__}: with weights and state in {name} its step over a gradient of "
            f"{size:.1g} is {much}; use {larger}sgd, or recipe.precision fp16-compute, which keeps both in float32"
        )


def check_flat(make: Callable[[Iterable[Named]], Optimizer], strategy: str) -> None:
    """Raise UsageError where check_optimizer does, or an optimizer treats a flattened tensor, in pieces, otherwise.

    It then sees neither the shape of a parameter nor its norm.
    """
    check_optimizer(make, dims=(2,))
    optimizer = make([("parameter", _tiny(2))])
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused or not all(_alike_when_flat(make, shape) for shape in _SHAPES):
        raise UsageError(
            f"strategy {strategy}: optimizer {type(optimizer).__name__} treats a tensor otherwise than flattened "
            f"pieces of it, so it cannot be handed over; use an optimizer such as sgd, adam or adamw without "
            f"fused=true, or another strategy"
        )


def bare_step(optimizer: Optimizer) -> Callable[[], object]:
    """Return the step of `optimizer` without what torch wraps around it: a record for its profiler, and step hooks.

    That record is made whether anybody profiles or not, and takes longer than the update of a small model. An optimizer
    that torch has not wrapped, or that has been given a step of its own, is returned its step as it is.
    """
    step = type(optimizer).step
    if "step" in vars(optimizer) or not getattr(step, "hooked", False):
        return cast(Callable[[], object], optimizer.step)
    return MethodType(cast(Any, step).__wrapped__, optimizer)


def _longest_steps(make: Callable[[Iterable[Named]], Optimizer], dtype: torch.dtype) -> Tensor:
    """Return how far a weight moves at most in one of some steps, for a constant gradient of each of the sizes."""
    parameter = Parameter(torch.zeros(len(_SIZES), 1, dtype=dtype))
    optimizer = make([("parameter", parameter)])
    longest = torch.zeros(len(_SIZES))
    for _ in range(_STEPS):
        before = parameter.detach().float().clone()
        parameter.grad = torch.tensor(_SIZES).to(dtype).unsqueeze(1)
        cast(Callable[[], object], optimizer.step)()
        moved = (parameter.detach().float() - before).abs().squeeze(1) / float(optimizer.defaults["lr"])
        longest = torch.where(moved.isnan(), moved, torch.maximum(longest, moved))
    return longest


def _alike_in_rows(
    make: Callable[[Iterable[Named]], Optimizer], shape: tuple[int, ...], dtype: torch.dtype | None
) -> bool:
    height = shape[0]
    cuts = [1, 2, height - 3], [height - 2, 2], [height // 2, height - height // 2]
    with AlikeInRows() if dtype is not None else nullcontext():  # type: ignore[no-untyped-call]
        whole = _tried(make, shape, [height], dtype)
        return all(torch.equal(_tried(make, shape, heights, dtype), whole) for heights in cuts)


def _alike_when_flat(make: Callable[[Iterable[Named]], Optimizer], shape: tuple[int, ...]) -> bool:
    """Say whether pieces of a flattened tensor end as the whole does, but for rounding."""
    whole = _tried(make, shape, [shape[0]], None).flatten()
    third = whole.numel() // 3
    flat = _tried(make, shape, [third, whole.numel() - third], None, flat=True)
    return torch.allclose(whole, flat.flatten(), rtol=1e-5, atol=1e-7)


def _tried(
    make: Callable[[Iterable[Named]], Optimizer],
    shape: tuple[int, ...],
    heights: Sequence[int],
    dtype: torch.dtype | None,
    flat: bool = False,
) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    start, gradients = (torch.randn(*several, *shape, generator=generator).to(dtype) for several in ((), (5,)))
    if flat and len(shape) > 1:  # with two dims still, since a recipe may decay those of one otherwise
        start, gradients = start.reshape(-1, 1), gradients.reshape(len(gradients), -1, 1)
    parts = [Parameter(part.clone()) for part in torch.split(start, list(heights))]
    optimizer = make([(f"part{number}", part) for number, part in enumerate(parts)])
    for gradient in gradients:
        for part, rows in zip(parts, torch.split(gradient, list(heights)), strict=True):
            part.grad = rows.clone()
        cast(Callable[[], object], optimizer.step)()
    return torch.cat([part.detach() for part in parts])


def _find(name: str) -> Factory:
    lower = name.lower()
    if lower in _OURS:
        return _OURS[lower]
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
    try:
        factory: Factory = optim.get_optimizer_class(name.lower(), bind_defaults=True)
    except (AssertionError, ImportError) as error:
        raise UsageError(f"optimizer {name}: it cannot be used here: {error}") from error
    return factory


def _check_asked(name: str, taken: Sequence[str] | None, asked: Iterable[str], decay_bias_and_norm: bool) -> None:
    keys = [*asked] if decay_bias_and_norm else [*asked, "weight_decay"]
    options = [each for each in taken or () if each not in _GIVEN]
    for key in keys:
        if key == "lr":
            raise UsageError(f"optimizer {name}: lr stands among its options; set optimizer.lr instead")
        if taken is not None and key not in options:
            raise UsageError(f"optimizer {name}: it has no {key}{choices(key, options)}")


def _groups(
    name: str,
    parameters: Iterable[Named],
    decay_bias_and_norm: bool,
    settings: Settings,
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


def _nothing(_: str) -> Mapping[str, Any]:
    return {}


def _asked_of(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the options that groups have beside a scale of the rate, which is ours to apply."""
    return [*{key: None for group in groups for key in group if key not in ("params", SCALE)}]


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


def _tiny(dim: int) -> Parameter:
    parameter = Parameter(torch.ones((2,) * dim))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def _listing(asked: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in asked.items()) or "nothing"
