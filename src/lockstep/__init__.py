"""Lockstep: train a recipe, or a loop of your own, on any placement with the same numbers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.comparison.drive import compare
    from lockstep.config.placement import Placement
    from lockstep.config.recipe import Recipe
    from lockstep.errors import LockstepError, PreflightError, TrainingError, UsageError, VerificationError
    from lockstep.run.background import evaluate, train
    from lockstep.run.joined import join
    from lockstep.run.load import load
    from lockstep.verification.own_loop import verify

__version__ = "0.1.0"

_PLACES = {
    "join": "run.joined",
    "train": "run.background",
    "evaluate": "run.background",
    "compare": "comparison.drive",
    "verify": "verification.own_loop",
    "load": "run.load",
    "Recipe": "config.recipe",
    "Placement": "config.placement",
    "LockstepError": "errors",
    "UsageError": "errors",
    "TrainingError": "errors",
    "PreflightError": "errors",
    "VerificationError": "errors",
}
__all__ = [
    "LockstepError",
    "Placement",
    "PreflightError",
    "Recipe",
    "TrainingError",
    "UsageError",
    "VerificationError",
    "compare",
    "evaluate",
    "join",
    "load",
    "train",
    "verify",
]


if not TYPE_CHECKING:  # else any name would do

    def __getattr__(name: str) -> Any:
        """Import what has a public name when it is first asked for: torch takes a second, and commands need it not."""
        if name not in _PLACES:
            raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
        if _PLACES[name].startswith(("comparison.", "run.", "verification.")):
            import_module("lockstep.common.platforms").need_posix(f"lockstep.{name}")
        return getattr(import_module(f"lockstep.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
