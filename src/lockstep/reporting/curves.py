"""Selects the metrics of an event that are plotted against the step. All sinks use the same names."""

from typing import Final

from lockstep.reporting import jsonl
from lockstep.reporting.run_log import figures
from lockstep.training.events import Event, Started

_LOG_ONLY: Final = ("peak_bytes",)


def curves(event: Event) -> dict[str, float]:
    """Return the metrics of a step report or an evaluation by curve name."""
    return {name: value for name, value in figures(jsonl.figures(event, 0.0)) if name not in _LOG_ONLY}


def tracked(event: Event) -> dict[str, float]:
    """Return the values for wandb and MLflow: the metrics and, for each start event, the number of processes."""
    return {"processes": event.processes} if isinstance(event, Started) else curves(event)
