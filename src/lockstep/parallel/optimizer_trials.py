"""What is asked of an optimizer before any process starts: each question is a trial, steps over small tensors.

A trial finds by itself what nobody could list: whether an optimizer of torch's, timm's or the user's own may be cut,
flattened, kept in 16 bits, or resumed.
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
from lockstep.common.own_code import OwnCode, own_error
from lockstep.errors import UsageError
from lockstep.parallel.narrow_steps import AlikeInRows
from lockstep.parallel.optimize import CONTRACT, OURS
from lockstep.parallel.optimizer_state import Named, load_optimizer_state, optimizer_state

Make = Callable[[Iterable[Named]], Optimizer]

# To be cut: most neither fill whole vectors of a CPU nor have parts that do; some are large enough to be factored.
_SHAPES: Final = ((13, 37), (33, 5), (130,), (1025,), (64, 64), (64, 3, 3, 3))
_STEPS: Final = 5

_SIZES: Final = (1.0, 0.1, 1e-2, 5e-3, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 0.0)  # of gradients, to be tried in 16 bits
_STEPS_IN_16_BITS: Final = 3


def check_optimizer(make: Make, dims: Iterable[int] = (1, 2)) -> None:
    """Raise UsageError where `make` does, or where the optimizer it returns cannot take a plain step.

    It steps over tiny parameters of so many `dims`, before any process is started, and so finds an optimizer
    that wants a closure, second derivatives, sparse gradients or none but matrices, or that keeps what no
    checkpoint holds.
    """
    optimizer = make([(f"parameter{dim}", _tiny(dim)) for dim in sorted(set(dims))])
    name = type(optimizer).__name__
    try:
        _step(optimizer)
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


def check_rows(make: Make, strategy: str, dtype: torch.dtype | None = None) -> None:
    """Raise UsageError where check_optimizer does, or an optimizer does not do to rows what it does to a whole tensor.

    It is tried on some shapes, cut unevenly, in `dtype` where weights are trained in that. Those of
    parallel/layerwise.py are given the norms of the whole, so they pass. Fused forms do not: where their vectors end
    decides bits, but not for all numbers, so no trial would be sure.
    """
    optimizer = _small_optimizer(make)
    if type(optimizer) in OURS.values():
        return
    if _is_fused(optimizer) or not all(_alike_in_rows(make, shape, dtype) for shape in _SHAPES):
        raise UsageError(
            f"strategy {strategy}: optimizer {type(optimizer).__name__} treats rows of a tensor otherwise than the "
            f"whole tensor, so it cannot be cut; use strategy ddp, or an optimizer such as sgd, adamw, lars or lamb "
            f"without fused=true"
        )


def check_flat(make: Make, strategy: str) -> None:
    """Raise UsageError where check_optimizer does, or an optimizer treats a flattened tensor, in pieces, otherwise.

    It then sees neither the shape of a parameter nor its norm.
    """
    optimizer = _small_optimizer(make)
    if _is_fused(optimizer) or not all(_alike_when_flat(make, shape) for shape in _SHAPES):
        raise UsageError(
            f"strategy {strategy}: optimizer {type(optimizer).__name__} treats a tensor otherwise than flattened "
            f"pieces of it, so it cannot be handed over; use an optimizer such as sgd, adam or adamw without "
            f"fused=true, or another strategy"
        )


def check_stored(make: Make, dtype: torch.dtype) -> None:
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


def check_own(path: str, make: Make) -> None:
    """Raise UsageError where an own optimizer raises, ignores the rate, is random, or keeps what no checkpoint holds.

    It steps by the rates a schedule would set; one goes on from what a checkpoint has of another.
    """
    with OwnCode(f"optimizer {path}"):
        usual = _after_steps(make, rate=1.0)
        if not torch.equal(usual, _after_steps(make, rate=1.0)):
            raise UsageError(
                f"optimizer {path}: two of them, given the same, step to other bits; let it draw no random numbers, "
                f"and keep nothing from one to the next ({CONTRACT})"
            )
        if torch.equal(usual, _after_steps(make, rate=0.5)):
            raise UsageError(
                f"optimizer {path}: its step is the same whatever the rate; multiply by group['lr'], which follows "
                f"the schedule ({CONTRACT})"
            )
        if not torch.equal(usual, _after_steps(make, rate=1.0, resumed=True)):
            raise UsageError(
                f"optimizer {path}: resumed from a checkpoint it steps to other bits: it keeps something outside of "
                f"self.state[parameter] and the numbers of its param_groups; keep it there ({CONTRACT})"
            )


def _small_optimizer(make: Make) -> Optimizer:
    check_optimizer(make, dims=(2,))
    return make([("parameter", _tiny(2))])


def _is_fused(optimizer: Optimizer) -> bool:
    return any(group.get("fused") for group in optimizer.param_groups)


def _longest_steps(make: Make, dtype: torch.dtype) -> Tensor:
    """Return the largest change of a weight in a step, in rates, for a constant gradient of each size: [sizes]."""
    parameter = Parameter(torch.zeros(len(_SIZES), 1, dtype=dtype))
    optimizer = make([("parameter", parameter)])
    longest = torch.zeros(len(_SIZES))
    for _ in range(_STEPS_IN_16_BITS):
        before = parameter.detach().float().clone()
        parameter.grad = torch.tensor(_SIZES).to(dtype).unsqueeze(1)
        _step(optimizer)
        moved = (parameter.detach().float() - before).abs().squeeze(1) / float(optimizer.defaults["lr"])
        longest = torch.where(moved.isnan(), moved, torch.maximum(longest, moved))
    return longest


def _alike_in_rows(make: Make, shape: tuple[int, ...], dtype: torch.dtype | None) -> bool:
    height = shape[0]
    cuts = [1, 2, height - 3], [height - 2, 2], [height // 2, height - height // 2]
    with AlikeInRows() if dtype is not None else nullcontext():  # type: ignore[no-untyped-call]
        whole = _after_steps(make, shape, dtype=dtype)
        return all(torch.equal(_after_steps(make, shape, heights, dtype), whole) for heights in cuts)


def _alike_when_flat(make: Make, shape: tuple[int, ...]) -> bool:
    """Say whether pieces of a flattened tensor end as the whole does, but for rounding."""
    whole = _after_steps(make, shape).flatten()
    third = whole.numel() // 3
    flat = _after_steps(make, shape, [third, whole.numel() - third], flat=True)
    return torch.allclose(whole, flat.flatten(), rtol=1e-5, atol=1e-7)


def _after_steps(
    make: Make,
    shape: tuple[int, ...] = (5, 3),
    heights: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    flat: bool = False,
    rate: float | None = None,
    resumed: bool = False,
) -> Tensor:
    """Return a tensor after some steps, in which it was in parts of so many rows; a `flat` one, of so many elements.

    With `rate` that is the first step's, and a schedule lowers it. Where it is `resumed`, another optimizer does the
    last step, from what a checkpoint has of the first one.
    """
    generator = torch.Generator().manual_seed(0)
    start, gradients = (torch.randn(*several, *shape, generator=generator).to(dtype) for several in ((), (_STEPS,)))
    if flat and len(shape) > 1:  # with two dims still, since a recipe may decay those of one otherwise
        start, gradients = start.reshape(-1, 1), gradients.reshape(len(gradients), -1, 1)
    cut = [len(start)] if heights is None else list(heights)
    parts = [Parameter(part.clone()) for part in torch.split(start, cut)]
    trained = [(f"part{number}", part) for number, part in enumerate(parts)]
    optimizer = make(trained)
    for number, gradient in enumerate(gradients):
        if resumed and number == _STEPS - 1:
            tensors, scalars = optimizer_state(trained, optimizer)
            kept = {name: tensor.clone() for name, tensor in tensors.items()}
            optimizer = make(trained)
            load_optimizer_state(trained, optimizer, kept, plainfile.parse_json(json.dumps(scalars)))
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate / (number + 1)
        for part, rows in zip(parts, torch.split(gradient, cut), strict=True):
            part.grad = rows.clone()
        _step(optimizer)
    return torch.cat([part.detach() for part in parts])


def _step(optimizer: Optimizer) -> None:
    cast(Callable[[], object], optimizer.step)()


def _tiny(dim: int) -> Parameter:
    parameter = Parameter(torch.ones((2,) * dim))
    parameter.grad = torch.ones_like(parameter)
    return parameter
