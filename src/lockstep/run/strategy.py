"""The strategy that a placement names: one of ours, or `package.module:Class` of the user's own."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, Final, cast

from pydantic import TypeAdapter, ValidationError

from lockstep.config.placement import Placement
from lockstep.core.mesh import Place
from lockstep.core.names import choices
from lockstep.errors import UsageError
from lockstep.importing import import_object
from lockstep.own_code import OwnCode
from lockstep.strategies.base import Strategy

_CONTRACT: Final = "see docs/bring-your-own.md"
_ONLY_WHERE_CUT: Final = "check_model"


def find_strategy(placement: Placement, processes: int) -> tuple[str, Strategy]:
    """Return the name and the strategy that a placement asks for; UsageError for wrong options, or an own one that
    lacks what strategies/base.py asks for."""
    name = placement.strategy.name
    if name == "auto":
        name = "single" if processes == 1 else "ddp"
    kind = _own(name) if ":" in name else import_module(f"lockstep.strategies.{name}").Strategy
    options = dict(placement.strategy.model_extra or {})
    valid = [field.name for field in fields(kind)]
    for key in options:
        if key not in valid:
            raise UsageError(f"placement.strategy.{key}: strategy {name} has no such option{choices(key, valid)}")
    with _code(name):
        if kind.recomputes:
            options.setdefault("recompute", placement.recompute != "none")
        made = _made(kind, options)
        if made.exactness not in ("bits", "close"):
            raise UsageError(f"strategy {name}: its exactness is {made.exactness!r}; make it 'bits' or 'close'")
    return name, made


def check_strategy(name: str, strategy: Strategy, processes: int, microbatches: int) -> None:
    """Raise UsageError where the strategy refuses so many processes, or deals a micro-batch to none or to several."""
    with _code(name):
        strategy.check(processes, microbatches)
        places = [strategy.place(rank, processes) for rank in range(processes)]
    wrong = next((each for each in places if not isinstance(each, Place)), None)
    if wrong is not None:
        raise UsageError(f"strategy {name}: place returned {type(wrong).__name__}; return a Place ({_CONTRACT})")
    held = Counter(
        number for place in places if place.speaks for number, dummy in place.indices(microbatches) if not dummy
    )
    for number in range(microbatches):
        if held[number] != 1:
            raise UsageError(
                f"strategy {name}: with {processes} processes micro-batch {number} of {microbatches} belongs to "
                f"{held[number]} ranks that speak; let place() give each to one ({_CONTRACT})"
            )


def _own(path: str) -> type[Any]:
    """Return the user's class, which has everything that a strategy has to have."""
    kind = import_object(path, "strategy")
    if not isinstance(kind, type) or not is_dataclass(kind):
        what = "a class, but no dataclass" if isinstance(kind, type) else f"of type {type(kind).__name__}"
        raise UsageError(f"strategy {path}: it is {what}; name a frozen dataclass ({_CONTRACT})")
    needed = [each for each in vars(Strategy) if not each.startswith("_")]
    found = dir(kind)
    missing = [each for each in needed if each not in found and each != _ONLY_WHERE_CUT]
    if not missing and inspect.getattr_static(kind, "cuts_model") is not False and _ONLY_WHERE_CUT not in found:
        missing = [_ONLY_WHERE_CUT]
    if missing:
        raise UsageError(f"strategy {path}: it has no {', '.join(missing)}; add it ({_CONTRACT})")
    return cast(type[Any], kind)


def _made(kind: type[Any], options: Mapping[str, Any]) -> Strategy:
    try:
        return cast(Strategy, TypeAdapter(kind).validate_python(options))
    except ValidationError as error:
        lines = [
            f"placement.strategy.{'.'.join(map(str, each['loc']))}: {each['msg']}; got {each['input']!r}"
            for each in error.errors()
        ]
        raise UsageError("\n".join(lines)) from error


def _code(name: str) -> OwnCode:
    return OwnCode(f"strategy {name}", shared=True)
