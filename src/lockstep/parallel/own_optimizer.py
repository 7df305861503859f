"""Optimizers of the user's own, `package.module:Class` or a function, and what is asked of one before it trains."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.common import plainfile
from lockstep.common.importing import import_object
from lockstep.common.own_code import OwnCode
from lockstep.errors import UsageError
from lockstep.parallel.optimizer_state import Named, load_optimizer_state, optimizer_state

Make = Callable[[Iterable[Named]], Optimizer]

_BEFORE: Final = 2  # steps before a resume that is tried, and one after it
_CONTRACT: Final = "see docs/bring-your-own.md"


def find_own(path: str) -> Callable[..., Any]:
    """Return the user's class or function; UsageError where it is neither, or takes no rate."""
    factory = import_object(path, "optimizer")
    if not callable(factory):
        raise UsageError(f"optimizer {path}: it is of type {type(factory).__name__}; name a class or a function")
    taken = accepted(factory)
    if taken is not None and "lr" not in taken:
        raise UsageError(f"optimizer {path}: it takes no lr; let it be (params, lr, ...) ({_CONTRACT})")
    return cast(Callable[..., Any], factory)


def accepted(factory: Callable[..., Any]) -> list[str] | None:
    """Return the names of all that a class or a function takes, None where it takes anything."""
    cls = factory.func if isinstance(factory, partial) else factory
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # of C
        return None
    return None if any(each.kind is each.VAR_KEYWORD for each in parameters.values()) else [*parameters]


def made_by(
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
        raise UsageError(f"optimizer {path}: it has no 'lr' in its defaults, where the schedule sets it ({_CONTRACT})")
    return made


def check_own(path: str, make: Make) -> None:
    """Raise UsageError where an own optimizer raises, ignores the rate, is random, or keeps what no checkpoint holds.

    It steps over small tensors, by the rates a schedule would set; one goes on from what a checkpoint has of another.
    """
    with OwnCode(f"optimizer {path}"):
        if not torch.equal(_after_steps(make, lr=1.0), _after_steps(make, lr=1.0)):
            raise UsageError(
                f"optimizer {path}: two of them, given the same, step to other bits; let it draw no random numbers, "
                f"and keep nothing from one to the next ({_CONTRACT})"
            )
        if torch.equal(_after_steps(make, lr=1.0), _after_steps(make, lr=0.5)):
            raise UsageError(
                f"optimizer {path}: its step is the same whatever the rate; multiply by group['lr'], which follows "
                f"the schedule ({_CONTRACT})"
            )
        if not torch.equal(_after_steps(make, lr=1.0), _after_steps(make, lr=1.0, resumed=True)):
            raise UsageError(
                f"optimizer {path}: resumed from a checkpoint it steps to other bits: it keeps something outside of "
                f"self.state[parameter] and the numbers of its param_groups; keep it there ({_CONTRACT})"
            )


def _after_steps(make: Make, lr: float, resumed: bool = False) -> Tensor:
    """Return a tensor after some steps, before the last of which another optimizer may take over."""
    generator = torch.Generator().manual_seed(0)
    parameter = Parameter(torch.randn(5, 3, generator=generator))
    trained = [("parameter", parameter)]
    optimizer = make(trained)
    for number in range(_BEFORE + 1):
        if resumed and number == _BEFORE:
            tensors, scalars = optimizer_state(trained, optimizer)
            kept = {name: tensor.clone() for name, tensor in tensors.items()}
            optimizer = make(trained)
            load_optimizer_state(trained, optimizer, kept, plainfile.parsed(json.dumps(scalars)))
        for group in optimizer.param_groups:
            group["lr"] = lr / (number + 1)
        parameter.grad = torch.randn(5, 3, generator=generator)
        cast(Callable[[], object], optimizer.step)()
    return parameter.detach()
