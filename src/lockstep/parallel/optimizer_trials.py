"""Optimizer checks that run before any process starts. Each check is a trial: a few steps on small tensors.

A list of supported optimizers couldn't cover all optimizers of torch, timm and your own code. Therefore trials
determine whether an optimizer works on shards, on flattened tensors, in 16 bits, and after a resume.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.common import plainfile
from lockstep.common.user_code import UserCode, convert_user_error
from lockstep.errors import UsageError
from lockstep.parallel.optimize import CONTRACT, OWN_OPTIMIZERS
from lockstep.parallel.optimizer_state import (
    NamedParameter,
    get_group_numbers,
    get_optimizer_state,
    load_optimizer_state,
)
from lockstep.parallel.sixteen_bit_updates import PositionIndependentMode

MakeTrialOptimizer = Callable[[Iterable[NamedParameter]], Optimizer]

# Tensor shapes for the sharding trials. Most tensors and row ranges don't fill a whole number of CPU vector registers.
# Some tensors are large enough that optimizers such as Adafactor factor their state.
_SHAPES: Final = ((13, 37), (33, 5), (130,), (1025,), (64, 64), (64, 3, 3, 3))
_STEPS: Final = 5

# Gradient magnitudes for the 16-bit trials.
_GRADIENT_MAGNITUDES: Final = (1.0, 0.1, 1e-2, 5e-3, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 0.0)
_STEPS_IN_16_BITS: Final = 3


def check_optimizer(make_optimizer: MakeTrialOptimizer, dims: Iterable[int] = (1, 2)) -> None:
    """Raise UsageError if the optimizer that `make_optimizer` returns can't be used.

    The optimizer performs a step on a small parameter for each number of dims in `dims`. This detects optimizers that
    require a closure, second derivatives, sparse gradients or matrices, and optimizers with state that a checkpoint
    can't store. Errors that `make_optimizer` raises are passed through.
    """
    optimizer = make_optimizer([(f"parameter{dim}", _make_small_parameter(dim)) for dim in sorted(set(dims))])
    name = type(optimizer).__name__
    try:
        _step(optimizer)
    except Exception as error:  # any exception, because it would also be raised in the first training step
        explanation = convert_user_error(error) or f"{error}; use a different optimizer"
        raise UsageError(f"optimizer {name}: a step without a closure failed: {explanation}") from error
    states = cast(dict[int, dict[str, Any]], optimizer.state_dict()["state"])
    for slot, value in ((slot, value) for values in states.values() for slot, value in values.items()):
        # A checkpoint can store plain tensors, but not tensor subclasses, such as 8-bit tensors with scales.
        if not isinstance(value, int | float | None) and type(value) not in (Tensor, Parameter):
            type_name = type(value).__name__
            raise UsageError(
                f"optimizer {name}: its state '{slot}' is a {type_name}, which a checkpoint cannot store; use a "
                f"different optimizer"
            )


def needs_full_tensors(make_optimizer: MakeTrialOptimizer, dtype: torch.dtype | None = None) -> bool:
    """Return whether an optimizer updates rows of a tensor differently than the full tensor.

    The trial splits the rows of several tensors unevenly. If `dtype` is set, the weights have this dtype. Lockstep's
    own optimizers can update rows, because they receive the norms of full tensors. For fused optimizers, this returns
    True without a trial: they compute different bits at the ends of tensors, but only for some values, so a trial could
    miss the difference. Raises the same errors as check_optimizer.
    """
    optimizer = _make_small_optimizer(make_optimizer)
    if type(optimizer) in OWN_OPTIMIZERS.values():
        return False
    return _is_fused(optimizer) or not all(_matches_split_by_rows(make_optimizer, shape, dtype) for shape in _SHAPES)


def check_row_updates(
    make_optimizer: MakeTrialOptimizer, strategy: str, dtype: torch.dtype | None = None, *, lends_wholes: bool
) -> bool:
    """Return whether an optimizer needs full tensors, for a strategy that shards tensors by rows.

    Set `lends_wholes` if the strategy can give each full tensor to one rank (parallel/layouts/owned.py). Raises
    UsageError if the optimizer needs full tensors without `lends_wholes`, or if it needs full tensors and the update of
    a tensor depends on tensors that other ranks can own. For example, some optimizers clip the norm of all gradients or
    estimate a common step size.
    """
    if not needs_full_tensors(make_optimizer, dtype):
        return False
    name = type(_make_small_optimizer(make_optimizer)).__name__
    if not lends_wholes:
        raise UsageError(
            f"strategy {strategy}: optimizer {name} updates rows of a tensor differently than the whole tensor, but "
            f"no rank has the whole tensor; use strategy ddp, zero1, zero2, zero3, hsdp, tensor or expert, or an "
            f"optimizer such as sgd, adamw, lars or lamb without fused=true"
        )
    try:
        matches = _matches_separately(make_optimizer, dtype)
    except Exception as error:  # custom code can raise anything
        raise UsageError(
            f"strategy {strategy}: optimizer {name} needs whole tensors, but its step fails if a tensor has no "
            f"gradient: {convert_user_error(error) or error}; tensors that other ranks update have no gradient, so "
            f"skip such tensors in its step"
        ) from error
    if not matches:
        raise UsageError(
            f"strategy {strategy}: optimizer {name} needs whole tensors, but its update of a tensor depends on tensors "
            f"that other ranks update; use strategy ddp, or an optimizer that updates each tensor independently"
        )
    return True


def check_flattened_updates(make_optimizer: MakeTrialOptimizer, strategy: str) -> None:
    """Raise UsageError if an optimizer updates flattened pieces of a tensor differently than the full tensor.

    This is the case if its update depends on the shape or the norm of a parameter. Also raises the same
    errors as check_optimizer.
    """
    optimizer = _make_small_optimizer(make_optimizer)
    if _is_fused(optimizer) or not all(_matches_flattened(make_optimizer, shape) for shape in _SHAPES):
        raise UsageError(
            f"strategy {strategy}: optimizer {type(optimizer).__name__} is not supported, because it updates flattened "
            f"pieces of a tensor differently than the whole tensor; use an optimizer such as sgd, adam or adamw "
            f"without fused=true, or use a different strategy"
        )


def check_stored_dtype(make_optimizer: MakeTrialOptimizer, dtype: torch.dtype) -> None:
    """Raise UsageError if a step with weights and optimizer state in `dtype` isn't finite or is too large.

    The trial uses gradients from 1 down to 0. Each step must be finite, and at most twice as large as the largest step
    in float32. For example, Adam with its default eps fails in float16: eps is rounded to 0, so a step can divide by
    zero.
    """
    optimizer = make_optimizer([("parameter", _make_small_parameter(2))])
    wide, narrow = (_measure_largest_steps(make_optimizer, each) for each in (torch.float32, dtype))
    for magnitude, largest in zip(_GRADIENT_MAGNITUDES, narrow.tolist(), strict=True):
        if math.isfinite(largest) and largest <= 2 * float(wide.max()):
            continue
        name = str(dtype).removeprefix("torch.")
        step_text = (
            f"{largest / float(wide.max()):.3g} times the largest in float32" if math.isfinite(largest) else largest
        )
        eps = next((group["eps"] for group in optimizer.param_groups if "eps" in group), None)
        eps_advice = "" if eps is None else f"an eps of 0.01 or more in its options (it is {eps}), "
        raise UsageError(
            f"optimizer {type(optimizer).__name__}: with weights and state in {name}, the step for a gradient of "
            f"{magnitude:.1g} is {step_text}; use {eps_advice}sgd, or recipe.precision fp16-compute, which keeps "
            f"weights and state in float32"
        )


def check_custom_optimizer(path: str, make_optimizer: MakeTrialOptimizer) -> None:
    """Raise UsageError if a custom optimizer doesn't meet the requirements of docs/extend.md.

    The trial checks that the optimizer is deterministic, depends on the learning rate, and computes the same weights
    after it is resumed from a checkpoint. The learning rate changes in each step, as with a schedule.
    """
    with UserCode(f"optimizer {path}"):
        weights = _run_steps(make_optimizer, rate=1.0)
        if not torch.equal(weights, _run_steps(make_optimizer, rate=1.0)):
            raise UsageError(
                f"optimizer {path}: two instances with the same inputs produced different weights; do not draw random "
                f"numbers, and do not share state between instances ({CONTRACT})"
            )
        if torch.equal(weights, _run_steps(make_optimizer, rate=0.5)):
            raise UsageError(
                f"optimizer {path}: its step does not depend on the learning rate; multiply the update by "
                f"group['lr'], which the schedule sets ({CONTRACT})"
            )
        if not torch.equal(weights, _run_steps(make_optimizer, rate=1.0, resumed=True)):
            raise UsageError(
                f"optimizer {path}: produces different weights when resumed from a checkpoint; keep all state in "
                f"self.state[parameter] and in numbers of its param_groups ({CONTRACT})"
            )


def _make_small_optimizer(make_optimizer: MakeTrialOptimizer) -> Optimizer:
    check_optimizer(make_optimizer, dims=(2,))
    return make_optimizer([("parameter", _make_small_parameter(2))])


def _is_fused(optimizer: Optimizer) -> bool:
    return any(group.get("fused") for group in optimizer.param_groups)


def _measure_largest_steps(make_optimizer: MakeTrialOptimizer, dtype: torch.dtype) -> Tensor:
    """Return the largest step for each gradient magnitude, divided by the learning rate: shape [magnitudes]."""
    parameter = Parameter(torch.zeros(len(_GRADIENT_MAGNITUDES), 1, dtype=dtype))
    optimizer = make_optimizer([("parameter", parameter)])
    largest = torch.zeros(len(_GRADIENT_MAGNITUDES))
    for _ in range(_STEPS_IN_16_BITS):
        previous = parameter.detach().float().clone()
        parameter.grad = torch.tensor(_GRADIENT_MAGNITUDES).to(dtype).unsqueeze(1)
        _step(optimizer)
        step_sizes = (parameter.detach().float() - previous).abs().squeeze(1) / float(optimizer.defaults["lr"])
        largest = torch.where(step_sizes.isnan(), step_sizes, torch.maximum(largest, step_sizes))
    return largest


def _matches_split_by_rows(
    make_optimizer: MakeTrialOptimizer, shape: tuple[int, ...], dtype: torch.dtype | None
) -> bool:
    height = shape[0]
    cuts = [1, 2, height - 3], [height - 2, 2], [height // 2, height - height // 2]
    with PositionIndependentMode() if dtype is not None else nullcontext():  # type: ignore[no-untyped-call]
        whole = _run_steps(make_optimizer, shape, dtype=dtype)
        return all(torch.equal(_run_steps(make_optimizer, shape, heights, dtype), whole) for heights in cuts)


def _matches_flattened(make_optimizer: MakeTrialOptimizer, shape: tuple[int, ...]) -> bool:
    """Return whether updates of flattened pieces match updates of the full tensor up to rounding errors."""
    whole = _run_steps(make_optimizer, shape).flatten()
    third = whole.numel() // 3
    flat = _run_steps(make_optimizer, shape, [third, whole.numel() - third], flat=True)
    return torch.allclose(whole, flat.flatten(), rtol=1e-5, atol=1e-7)


def _run_steps(
    make_optimizer: MakeTrialOptimizer,
    shape: tuple[int, ...] = (5, 3),
    heights: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    flat: bool = False,
    rate: float | None = None,
    resumed: bool = False,
) -> Tensor:
    """Return a tensor of shape `shape` after a few steps of the optimizer.

    If `heights` is set, the tensor is split into parameters with these numbers of rows. If `flat` is set, the tensor is
    flattened first, and `heights` are numbers of elements. `rate` is the learning rate of the first step, and decreases
    in later steps. If `resumed` is set, a second optimizer loads the state of the first and takes the last step.
    """
    generator = torch.Generator().manual_seed(0)
    start, gradients = (torch.randn(*dims, *shape, generator=generator).to(dtype) for dims in ((), (_STEPS,)))
    if flat and len(shape) > 1:  # keep two dims, because a recipe can set a different decay for 1-dim tensors
        start, gradients = start.reshape(-1, 1), gradients.reshape(len(gradients), -1, 1)
    lengths = [len(start)] if heights is None else list(heights)
    parts = [Parameter(part.clone()) for part in torch.split(start, lengths)]
    trained = [(f"part{number}", part) for number, part in enumerate(parts)]
    optimizer = make_optimizer(trained)
    for number, gradient in enumerate(gradients):
        if resumed and number == _STEPS - 1:
            tensors, scalars = get_optimizer_state(trained, optimizer)
            saved = {name: tensor.clone() for name, tensor in tensors.items()}
            optimizer = make_optimizer(trained)
            load_optimizer_state(trained, optimizer, saved, plainfile.parse_json(json.dumps(scalars)))
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate / (number + 1)
        for part, rows in zip(parts, torch.split(gradient, lengths), strict=True):
            part.grad = rows.clone()
        _step(optimizer)
    return torch.cat([part.detach() for part in parts])


def _matches_separately(make_optimizer: MakeTrialOptimizer, dtype: torch.dtype | None) -> bool:
    """Return whether updating two matrices together computes the same values as updating each of them separately."""
    together = _run_steps_on_pair(make_optimizer, (True, True), dtype)
    only_first, only_second, neither = (
        _run_steps_on_pair(make_optimizer, with_gradient, dtype)
        for with_gradient in ((True, False), (False, True), (False, False))
    )
    matches = torch.equal(together[0], only_first[0]) and torch.equal(together[1], only_second[1])
    return matches and together[2] == only_first[2] == only_second[2] == neither[2]


def _run_steps_on_pair(
    make_optimizer: MakeTrialOptimizer, with_gradient: tuple[bool, bool], dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, list[dict[str, Any]]]:
    """Return two matrices after a few steps of the optimizer, and the numbers in its parameter groups.

    `with_gradient` selects the matrices that have gradients.
    """
    generator = torch.Generator().manual_seed(0)
    matrices = [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in _SHAPES[:2]]
    optimizer = make_optimizer([(f"part{number}", each) for number, each in enumerate(matrices)])
    for _ in range(_STEPS):
        for matrix, has_gradient in zip(matrices, with_gradient, strict=True):
            gradient = torch.randn(matrix.shape, generator=generator).to(dtype)
            matrix.grad = gradient if has_gradient else None
        _step(optimizer)
    first, second = (each.detach() for each in matrices)
    return first, second, get_group_numbers(optimizer.param_groups)


def _step(optimizer: Optimizer) -> None:
    cast(Callable[[], object], optimizer.step)()


def _make_small_parameter(dim: int) -> Parameter:
    parameter = Parameter(torch.ones((2,) * dim))
    parameter.grad = torch.ones_like(parameter)
    return parameter
