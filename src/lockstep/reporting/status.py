"""How far a run is, from its event log; and what state it is in, with what is known of its process and its job."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

State = Literal["queued", "running", "saved", "done", "died", "unreadable"]

_REPORTS: Final = 20  # of steps, over which speed is measured: an evaluation now and then is in, former hours are not
_WAITING: Final = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_AT_WORK: Final = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING")


@dataclass(frozen=True, slots=True)
class Status:
    """What an event log says; None is what it does not say.

    `last` is the name of its last event and `time` that event's, in seconds since 1970. `epoch` is the number of the
    epoch that the last step belongs to, from 1. `images_per_s` and `left_s`, the seconds to the last step, are at the
    speed of the last reports since the last start, evaluating and saving included.
    """

    last: str | None = None
    time: float | None = None
    reason: str | None = None
    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    images_per_s: float | None = None
    left_s: float | None = None
    loss: float | None = None
    top1: float | None = None


@dataclass(slots=True)
class _Seen:
    """What was seen of the log so far; `reports` are (time, step, samples) since the last start, its own first."""

    started: Mapping[str, Any] = field(default_factory=dict)
    loss: float | None = None
    top1: float | None = None
    reports: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=_REPORTS + 1))


def status(events: Iterable[Mapping[str, Any]]) -> Status:
    """Return what a run's events say, in the order of their log. Of what stands there twice the later one counts."""
    seen = _Seen()
    event: Mapping[str, Any] = {}
    for event in events:
        _take(seen, event)
    step, steps = event.get("step"), seen.started.get("steps")
    per_epoch, epochs = seen.started.get("steps_per_epoch"), seen.started.get("epochs")
    steps_per_s, images_per_s = _speed(seen)
    return Status(
        last=event.get("event"),
        time=event.get("time"),
        reason=event.get("reason"),
        step=step,
        steps=steps,
        epoch=-(-step // per_epoch) if step is not None and per_epoch else None,
        epochs=None if epochs is None else math.ceil(epochs),
        images_per_s=images_per_s,
        left_s=(steps - step) / steps_per_s if steps_per_s and steps is not None and step is not None else None,
        loss=seen.loss,
        top1=seen.top1,
    )


def state(status: Status, held: bool, submitted: float | None = None, job: str | None = None) -> State:
    """Return the state of a run whose log could be read.

    `held` says whether a process holds the lock of its folder, `submitted` when it was last given to Slurm, and `job`
    Slurm's state of that job: empty where Slurm does not know it any more, None where nobody could be asked.
    """
    if status.last == "done":
        return "done"
    if held or job in _AT_WORK:  # the job may be there before it holds the lock
        return "running"
    if job in _WAITING or (job is None and submitted is not None and submitted > (status.time or 0)):
        return "queued"
    return "saved" if status.last == "stopped" else "died"


def _take(seen: _Seen, event: Mapping[str, Any]) -> None:
    match event.get("event"):
        case "started":
            seen.started = event
            seen.reports.clear()
            seen.reports.append((event["time"], event["step"], event["samples"]))
        case "step":
            seen.loss = float(event["loss"])  # "NaN" too
            seen.reports.append((event["time"], event["step"], event["samples"]))
        case "evaluated":
            seen.top1 = event.get("top1")


def _speed(seen: _Seen) -> tuple[float | None, float | None]:
    """Return steps and samples a second."""
    if len(seen.reports) < 2:
        return None, None
    began, first_step, first_sample = seen.reports[0]
    time, step, sample = seen.reports[-1]
    if time <= began:
        return None, None
    return (step - first_step) / (time - began), (sample - first_sample) / (time - began)
