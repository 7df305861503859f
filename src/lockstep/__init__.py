"""Lockstep: train a recipe, or a loop of your own, on any placement with the same numbers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.common.version import __version__ as __version__

if TYPE_CHECKING:
    from lockstep.comparison.drive import compare
    from lockstep.comparison.result import Comparison
    from lockstep.config.placement import Placement
    from lockstep.config.recipe import Recipe
    from lockstep.errors import LockstepError, PreflightError, TrainingError, UsageError, VerificationError
    from lockstep.exports.export import Exported, export
    from lockstep.inference.load import load
    from lockstep.inference.predict import Prediction, predict
    from lockstep.inference.report import Report, report
    from lockstep.loop.batch_sampler import BatchSampler
    from lockstep.loop.run import Run, join
    from lockstep.loop.step import Step
    from lockstep.run.background import evaluate, train
    from lockstep.training.events import (
        Corrupted,
        Done,
        Evaluated,
        Event,
        Logged,
        Saved,
        Skipped,
        Started,
        Stepped,
        Stopped,
        Warned,
    )
    from lockstep.verification.custom_loop import Checked, verify

_MODULES = {
    "comparison.drive": "compare",
    "comparison.result": "Comparison",
    "config.placement": "Placement",
    "config.recipe": "Recipe",
    "errors": "LockstepError PreflightError TrainingError UsageError VerificationError",
    "exports.export": "Exported export",
    "inference.load": "load",
    "inference.predict": "Prediction predict",
    "inference.report": "Report report",
    "run.background": "evaluate train",
    "loop.batch_sampler": "BatchSampler",
    "loop.run": "Run join",
    "loop.step": "Step",
    "training.events": "Corrupted Done Evaluated Event Logged Saved Skipped Started Stepped Stopped Warned",
    "verification.custom_loop": "Checked verify",
}
# All other modules need POSIX to lock run folders and start processes.
_PORTABLE_MODULES = ("config.placement", "config.recipe", "errors", "training.events")
__all__ = ["LockstepError", "PreflightError", "TrainingError", "UsageError", "VerificationError"]
__all__ += ["BatchSampler", "Checked", "Comparison", "Exported", "Placement", "Prediction", "Recipe", "Report", "Run"]
__all__ += ["Corrupted", "Done", "Evaluated", "Event", "Logged", "Saved", "Skipped", "Started", "Step", "Stepped"]
__all__ += ["Stopped", "Warned"]
__all__ += ["compare", "evaluate", "export", "join", "load", "predict", "report", "train", "verify"]


if not TYPE_CHECKING:  # otherwise, type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used.

        Importing torch takes a second, and not every command needs it.
        """
        module = next((module for module, names in _MODULES.items() if name in names.split()), None)
        if module is None:
            raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
        if module not in _PORTABLE_MODULES:
            import_module("lockstep.common.platforms").require_posix(f"lockstep.{name}")
        return getattr(import_module(f"lockstep.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
