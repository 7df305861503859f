"""Selects which metrics of an event are plotted against the step. All sinks use the same metric names."""

from typing import Final

from lockstep.reporting import jsonl
from lockstep.reporting.run_log import iterate_metrics
from lockstep.training.events import Event, Started

_LOG_ONLY: Final = ("peak_bytes",)


def select_metrics(event: Event) -> dict[str, float]:
    """Return the metrics of a step report or an evaluation as a dict from curve name to value."""
    return {name: value for name, value in iterate_metrics(jsonl.to_json_fields(event, 0.0)) if name not in _LOG_ONLY}


def select_tracked_metrics(event: Event) -> dict[str, float]:
    """Return the values to log to wandb and MLflow: the metrics or, for a start event, the number of processes."""
    return {"processes": event.processes} if isinstance(event, Started) else select_metrics(event)
