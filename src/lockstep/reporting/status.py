"""How far a run is, from its event log; and what state it is in, with what is known of its process and its job."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, final

State = Literal["queued", "running", "saved", "done", "died", "unreadable"]

_REPORTS: Final = 20  # of steps, over which speed is measured: an evaluation now and then is in, former hours are not
_LARGEST: Final = 1e15  # no figure of an event is; larger ones are no floats, or times that no calendar has
_WAITING: Final = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_AT_WORK: Final = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING")


class Figure(NamedTuple):
    """A figure of an evaluation, and whether it is a share of one."""

    name: str
    value: float
    is_fraction: bool


@dataclass(frozen=True, slots=True)
class Status:
    """What an event log holds; None is what it does not hold.

    `last` is the name of its last event and `time` that event's, in seconds since 1970. `epoch` is the number of the
    epoch that the last step belongs to, from 1. `samples_per_s` and `left_s`, the seconds to the last step, are at the
    speed of the last reports since the last start, evaluating and saving included.
    """

    last: str | None = None
    time: float | None = None
    reason: str | None = None
    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    samples_per_s: float | None = None
    left_s: float | None = None
    loss: float | None = None
    figure: Figure | None = None


def status(events: Iterable[Mapping[str, Any]]) -> Status:
    """Return what a run's events say, in the order of their log. Of what stands there twice the later one counts.

    KeyError or ValueError where they are no events of this version.
    """
    builder = StatusBuilder()
    for event in events:
        builder.take(event)
    return builder.status()


@final
class StatusBuilder:
    """Takes the events of a log one by one; `status` is what they say so far."""

    def __init__(self) -> None:
        self._last: Mapping[str, Any] = {}
        self._started: Mapping[str, Any] = {}
        self._loss: float | None = None
        self._figure: Figure | None = None
        # (time, step, samples) since the last start, its own first
        self._reports: deque[tuple[float, int, int]] = deque(maxlen=_REPORTS + 1)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take the next event; KeyError or ValueError where it is none of this version."""
        match event.get("event"):
            case "started":
                report = _report(event)
                self._started = event
                self._reports.clear()
                self._reports.append(report)
            case "step":
                self._loss = _loss(event["loss"])
                self._reports.append(_report(event))
            case "evaluated":
                self._figure = _monitored(event, self._started)
        self._last = event

    def status(self) -> Status:
        """Return what the events so far say; ValueError where the last one is none of this version."""
        event, started = self._last, self._started
        step, steps = _count(event, "step"), _count(started, "steps")
        per_epoch, epochs = _count(started, "steps_per_epoch"), _number(started, "epochs")
        steps_per_s, samples_per_s = _speed(self._reports)
        return Status(
            last=_text(event, "event"),
            time=_number(event, "time"),
            reason=_text(event, "reason"),
            step=step,
            steps=steps,
            epoch=-(-step // per_epoch) if step is not None and per_epoch else None,
            epochs=None if epochs is None else math.ceil(epochs),
            samples_per_s=samples_per_s,
            left_s=(steps - step) / steps_per_s if steps_per_s and steps is not None and step is not None else None,
            loss=self._loss,
            figure=self._figure,
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


def _monitored(event: Mapping[str, Any], started: Mapping[str, Any]) -> Figure | None:
    """Return the figure of an evaluation that says which is the best; None where that is its loss."""
    name = _text(started, "monitor")
    if name is None or name == "loss" or event.get(name) is None:
        return None
    fractions = started.get("fractions")
    return Figure(name, _loss(event[name]), isinstance(fractions, list) and name in fractions)


def _report(event: Mapping[str, Any]) -> tuple[float, int, int]:
    time, step, samples = _number(event, "time"), _count(event, "step"), _count(event, "samples")
    if time is None or step is None or samples is None:
        raise KeyError(next(key for key in ("time", "step", "samples") if event.get(key) is None))
    return time, step, samples


def _number(event: Mapping[str, Any], key: str) -> float | None:
    value = event.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < _LARGEST:
        raise ValueError(f"{key}: not a number of an event")
    return float(value)


def _count(event: Mapping[str, Any], key: str) -> int | None:
    value = event.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"{key}: not a count")
    return value


def _text(event: Mapping[str, Any], key: str) -> str | None:
    value = event.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{key}: not text")
    return value


def _loss(value: Any) -> float:
    if type(value) is float or (type(value) is int and abs(value) < _LARGEST):
        return float(value)
    if value not in ("NaN", "Infinity", "-Infinity"):
        raise ValueError("loss: not a number")
    return float(value)


def _speed(reports: Sequence[tuple[float, int, int]]) -> tuple[float | None, float | None]:
    """Return steps and samples a second."""
    if len(reports) < 2:
        return None, None
    began, first_step, first_sample = reports[0]
    time, step, sample = reports[-1]
    if time <= began:
        return None, None
    return (step - first_step) / (time - began), (sample - first_sample) / (time - began)
