"""What an event log holds from its beginning to its end: the curves of a run, its starts and its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Final, final

from lockstep.common.text import printable_line
from lockstep.reporting.thinning import Point, Thinned
from lockstep.training.events import Evaluated, Stepped

_NOT_FINITE: Final = ("NaN", "Infinity", "-Infinity")
_LARGEST: Final = 1e300
_OF_STEP: Final = ("lr", "samples_per_s", "norm", "loss_scale", "flops_per_s", "mfu", "peak_bytes")
_MOST_CURVES: Final = 100  # of one run; a log of ours has some ten


@dataclass(frozen=True)
class Start:
    """A start of the run, at `step`; `again` are the steps that it recomputes, `seconds` its place on the time axis."""

    time: float
    step: int
    samples: int
    seconds: float
    again: int
    processes: int | None
    strategy: str
    device: str
    resumed: bool


@dataclass(frozen=True)
class Save:
    """A checkpoint that was written after `step` steps in `took_s` seconds."""

    step: int
    samples: int
    seconds: float
    took_s: float
    best: bool
    weights_sha256: str


@dataclass(frozen=True)
class History:
    """A run by its log. `last` is its last event, `started` its last start's; both are empty where there is none.

    `curves` are figures by the names of reporting/curves.py, thinned where they are long; of a step that was recomputed
    the later figures count, and the seconds of both. `seconds` are those of all starts together.
    """

    starts: list[Start] = field(default_factory=list)
    curves: dict[str, list[Point]] = field(default_factory=dict)
    saves: list[Save] = field(default_factory=list)
    started: Mapping[str, Any] = field(default_factory=dict)
    last: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def fractions(self) -> frozenset[str]:
        """The figures that are shares of one."""
        named = self.started.get("fractions")
        return frozenset(each for each in named if isinstance(each, str)) if isinstance(named, list) else frozenset()

    @property
    def monitor(self) -> str:
        """The figure by which an evaluation is the best."""
        return text(self.started, "monitor") or "loss"

    @property
    def weights_sha256(self) -> str:
        """The hash of the weights in the end; empty for a run that has not come there."""
        return text(self.last, "weights_sha256") if self.last.get("event") == "done" else ""

    def last_of(self, curve: str) -> float | None:
        """Return where a curve ends, None where there is none."""
        points = self.curves.get(curve)
        return points[-1].value if points else None


def history(events: Iterable[Mapping[str, Any]]) -> History:
    """Return what the events of a log hold, in their order; what is no figure of an event of ours is left out."""
    builder = HistoryBuilder()
    for event in events:
        builder.take(event)
    return builder.history()


@final
class HistoryBuilder:
    """Takes the events of a log one by one; `history` is what they hold so far."""

    def __init__(self) -> None:
        self._starts: list[Start] = []
        self._curves: dict[str, Thinned] = {}
        self._saves: list[Save] = []
        self._started: Mapping[str, Any] = {}
        self._last: Mapping[str, Any] = {}
        self._began: float | None = None  # when this start did
        self._before = self._now = 0.0  # the seconds of the former ones, and the time of the last event

    def take(self, event: Mapping[str, Any]) -> None:
        """Take the next event."""
        self._last = event
        time = _number(event, "time")
        step, samples = count(event, "step"), count(event, "samples")
        if time is None or step is None or samples is None:
            return
        if self._began is None:
            self._began = self._now = time
        if event.get("event") == "started":
            self._before += max(0.0, self._now - self._began)
            self._began, self._started = time, event
            self._forget(step)
            self._starts.append(_start(event, time, step, samples, self._before))
        self._now = time
        seconds = self._seconds
        for name, value in figures(event):
            curve = self._curves.get(name)
            if curve is None:
                if len(self._curves) == _MOST_CURVES:
                    continue
                curve = self._curves[name] = Thinned()
            curve.append(Point(step, samples, seconds, value))
        if event.get("event") == "saved":
            took, best = _number(event, "seconds") or 0.0, event.get("best") is True
            self._saves.append(Save(step, samples, seconds, took, best, text(event, "weights_sha256")))

    def history(self) -> History:
        """Return what the events so far hold."""
        curves = {name: curve.points() for name, curve in self._curves.items()}
        return History([*self._starts], curves, [*self._saves], self._started, self._last, self._seconds)

    @property
    def _seconds(self) -> float:
        return self._before + max(0.0, self._now - (self._began or 0.0))

    def _forget(self, step: int) -> None:
        """Drop what came after `step`: it is recomputed."""
        for curve in self._curves.values():
            curve.cut(step)
        self._saves = [save for save in self._saves if save.step <= step]


def text(event: Mapping[str, Any], key: str) -> str:
    """Return text of an event, fit to print, and empty where there is none."""
    value = event.get(key)
    return printable_line(value) if isinstance(value, str) else ""


def count(event: Mapping[str, Any], key: str) -> int | None:
    """Return a count of an event, None where there is none."""
    value = event.get(key)
    return value if type(value) is int and 0 <= value < _LARGEST else None


def figures(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the figures of an event under the names that reporting/curves.py gives them."""
    kind, weights = event.get("event"), event.get("weights", "model")
    if isinstance(kind, str) and kind in ("step", "evaluated", "logged"):
        for key, value in event.items():
            if (name := _name(kind, key, weights == "model")) and (number := _figure(value)) is not None:
                yield name, number


def by_rank(event: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return what the seconds of each rank went to, as `done` says; empty where it does not."""
    spent = event.get("seconds_by_rank")
    if not isinstance(spent, dict):
        return {}
    numbers = {printable_line(what): _numbers(each) for what, each in spent.items()}
    ranks = {len(each) for each in numbers.values()}
    return numbers if len(ranks) == 1 else {}


def peaks(event: Mapping[str, Any]) -> list[float]:
    """Return the peak of memory of each rank in bytes, as `done` says; empty where it does not."""
    return _numbers(event.get("peak_bytes_by_rank"))


def _start(event: Mapping[str, Any], time: float, step: int, samples: int, seconds: float) -> Start:
    return Start(
        time=time,
        step=step,
        samples=samples,
        seconds=seconds,
        again=count(event, "again") or 0,
        processes=count(event, "processes"),
        strategy=text(event, "strategy"),
        device=text(event, "device"),
        resumed=event.get("resumed_from") is not None,
    )


@lru_cache(maxsize=1_000)  # a log has many events of few kinds
def _name(kind: str, key: str, of_model: bool) -> str:
    """Return the name of a figure of an event; empty where it is none."""
    if kind == "step":
        names = {"loss": "loss/train", **{name: name for name in _OF_STEP}}
        own, suffix = {each.name for each in fields(Stepped)}, "/train"
    elif kind == "evaluated":
        suffix = "" if of_model else "/ema"
        names, own = {"loss": f"loss/validation{suffix}"}, {each.name for each in fields(Evaluated)}
    else:
        names, own, suffix = {}, {"step", "epoch", "samples"}, ""
    return names.get(key) or ("" if key in own or key in ("event", "time") else printable_line(key) + suffix)


def _figure(value: Any) -> float | None:
    """Return a figure, which may be not finite; None where it is no number."""
    if type(value) in (int, float):
        return float(value) if abs(value) < _LARGEST else None
    return float(value) if value in _NOT_FINITE else None


def _number(event: Mapping[str, Any], key: str) -> float | None:
    value = _figure(event.get(key))
    return value if value is not None and math.isfinite(value) and value >= 0 else None


def _numbers(values: Any) -> list[float]:
    if not isinstance(values, list):
        return []
    found = [_figure(each) for each in values]
    return [each for each in found if each is not None and math.isfinite(each) and each >= 0]
