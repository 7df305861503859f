"""The figures of an event that are plotted against the step, under the same name in every sink."""

from typing import Final

from lockstep.reporting import jsonl
from lockstep.reporting.run_log import figures
from lockstep.training.events import Event, Started

_IN_THE_LOG_ALONE: Final = ("peak_bytes",)


def curves(event: Event) -> dict[str, float]:
    """Return the figures of a step report or an evaluation by the names of their curves."""
    return {name: value for name, value in figures(jsonl.figures(event, 0.0)) if name not in _IN_THE_LOG_ALONE}


def tracked(event: Event) -> dict[str, float]:
    """Return the figures for wandb and MLflow: the curves, and the number of processes of each start."""
    return {"processes": event.processes} if isinstance(event, Started) else curves(event)
