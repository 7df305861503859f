"""Finds the strategy of a placement: a built-in strategy, or a custom class `package.module:Class`."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, Final, cast

from pydantic import TypeAdapter, ValidationError

from lockstep.common.importing import import_object
from lockstep.common.names import format_choices
from lockstep.common.user_code import UserCode
from lockstep.config.placement import FASTEST, Placement
from lockstep.core.mesh import Mesh
from lockstep.errors import UsageError
from lockstep.strategies.base import Strategy, Traits

_DOCS_HINT: Final = "see docs/extend.md"


def find_strategy(placement: Placement, processes: int) -> tuple[str, Strategy]:
    """Return the name and the instance of the strategy of a placement.

    Raises UsageError if an option is invalid, or if a custom strategy lacks a member of the protocol `Strategy`.
    """
    name = placement.strategy.name
    if name == "auto":
        name = "single" if processes == 1 else "ddp"
    if name == FASTEST:
        raise UsageError(
            "placement.strategy: fastest is only supported by lockstep train, on ranks that it starts itself; set the "
            "name of a strategy, such as the one that lockstep plan --write sets in a recipe"
        )
    strategy_class = _import_strategy(name) if ":" in name else import_module(f"lockstep.strategies.{name}").Strategy
    options = dict(placement.strategy.model_extra or {})
    option_names = [field.name for field in fields(strategy_class)]
    for key in options:
        if key not in option_names:
            raise UsageError(
                f"placement.strategy.{key}: strategy {name} has no such option{format_choices(key, option_names)}"
            )
    with _mark_strategy_code(name):
        if "recompute" in option_names:
            options.setdefault("recompute", placement.recompute != "none")
        strategy = _build_strategy(strategy_class, options)
        traits = strategy.traits
        if not isinstance(traits, Traits):
            raise UsageError(f"strategy {name}: traits returned {type(traits).__name__}; return Traits ({_DOCS_HINT})")
        if traits.exactness not in ("bits", "close", "none"):
            raise UsageError(
                f"strategy {name}: traits.exactness is {traits.exactness!r}; set it to 'bits', 'close' or 'none'"
            )
    return name, strategy


def get_recompute_interval(placement: Placement, strategy: Strategy) -> int:
    """Return k if every k-th block recomputes its activations, or 0 if no block does.

    Also returns 0 if the strategy has an option `recompute`, because it then applies recomputation itself.
    """
    has_own_option = any(field.name == "recompute" for field in fields(strategy))  # type: ignore[arg-type]
    if placement.recompute == "none" or has_own_option:
        return 0
    return 1 if placement.recompute == "full" else int(placement.recompute.removeprefix("every_"))


def check_strategy(name: str, strategy: Strategy, processes: int, microbatches: int) -> None:
    """Raise UsageError if the strategy rejects this number of processes, or returns a mesh of a different size."""
    with _mark_strategy_code(name):
        strategy.check(processes, microbatches)
        mesh = strategy.mesh(processes)
    if not isinstance(mesh, Mesh):
        raise UsageError(f"strategy {name}: mesh returned {type(mesh).__name__}; return a Mesh ({_DOCS_HINT})")
    if mesh.size != processes or min(mesh) < 1:
        axes = " x ".join(f"{axis}={length}" for axis, length in mesh._asdict().items() if length != 1) or "one rank"
        raise UsageError(
            f"strategy {name}: mesh returned {axes} for {processes} processes; return lengths whose product is "
            f"{processes} ({_DOCS_HINT})"
        )


def _import_strategy(path: str) -> type[Any]:
    """Import a custom strategy class. Raises UsageError if it isn't a dataclass or lacks a required member."""
    strategy_class = import_object(path, "strategy")
    if not isinstance(strategy_class, type) or not is_dataclass(strategy_class):
        problem = (
            "is a class, but not a dataclass"
            if isinstance(strategy_class, type)
            else f"has type {type(strategy_class).__name__}"
        )
        raise UsageError(f"strategy {path}: {problem}; name a frozen dataclass ({_DOCS_HINT})")
    required = [name for name in vars(Strategy) if not name.startswith("_")]
    members = dir(strategy_class)
    missing = [name for name in required if name not in members]
    if missing:
        raise UsageError(f"strategy {path}: has no {', '.join(missing)}; add the missing members ({_DOCS_HINT})")
    return cast(type[Any], strategy_class)


def _build_strategy(strategy_class: type[Any], options: Mapping[str, Any]) -> Strategy:
    try:
        return cast(Strategy, TypeAdapter(strategy_class).validate_python(options))
    except ValidationError as error:
        lines = [
            f"placement.strategy.{'.'.join(map(str, problem['loc']))}: {problem['msg']}; got {problem['input']!r}"
            for problem in error.errors()
        ]
        raise UsageError("\n".join(lines)) from error


def _mark_strategy_code(name: str) -> UserCode:
    return UserCode(f"strategy {name}", shared=True)
