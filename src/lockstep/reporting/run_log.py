"""Reads the event log of a run, and derives its progress, curves, restarts and checkpoints."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Final, NamedTuple, final

from lockstep.common.text import printable_line
from lockstep.reporting.thinning import Point, ThinnedCurve
from lockstep.training.events import Evaluated, Stepped

_NOT_FINITE: Final = ("NaN", "Infinity", "-Infinity")
_MAX_MAGNITUDE: Final = 1e300  # metrics with a larger magnitude are ignored
_MAX_COUNT: Final = 1e15  # larger integers can't be represented exactly as floats, or aren't valid timestamps
_STEP_FIELDS: Final = ("lr", "samples_per_s", "data_s", "norm", "loss_scale", "flops_per_s", "mfu", "peak_bytes")
_TRAINING_SUFFIX: Final = "/train"  # suffix in the names of training curves
_VALIDATION_SUFFIX: Final = "/validation"  # suffix in the name of the validation loss curve
_MAX_CURVES: Final = 100  # maximum number of curves of a run; a typical log has about ten
_SPEED_REPORTS: Final = 20  # number of step reports over which the speed is averaged


class SpeedSample(NamedTuple):
    """The progress of a run at a point in time. The training speed is computed from two such samples."""

    time: float
    step: int
    samples: int


class EvaluationMetric(NamedTuple):
    """A metric of an evaluation. `is_fraction` is whether the value is a fraction, which is shown as a percentage."""

    name: str
    value: float
    is_fraction: bool


@dataclass(frozen=True)
class RunStart:
    """A start event of a run, which starts or resumes after `step` steps.

    `recomputed_steps` is the number of steps that the run recomputes. `seconds` is the training time before this event.
    """

    step: int
    seconds: float
    recomputed_steps: int
    processes: int | None
    strategy: str
    device: str
    resumed: bool


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint after `step` steps and `seconds` of training. `duration_s` is the duration of the save."""

    step: int
    seconds: float
    duration_s: float
    best: bool
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The progress of a run. A field is None if the log doesn't contain it.

    `last` is the name of the latest event, and `time` is its time in seconds since 1970. `epoch` is the epoch of the
    latest step, counted from 1. `left_s` is the estimated remaining time in seconds. `samples_per_s` and `left_s` are
    computed from the most recent step reports since the latest start, including the time of evaluations and saves.
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
    figure: EvaluationMetric | None = None


@dataclass(frozen=True)
class History:
    """The history of a run, as read from its event log.

    `last` is the latest event, `started` the latest start event, and `evaluated` the latest evaluation event, or empty
    if there is none. `curves` maps curve names to points. Long curves are thinned out. If a step was recomputed, only
    its later metrics are kept, but the time of both computations counts. `seconds` is the total training time, without
    the pauses between stopping and resuming. `skipped` is the number of unreadable files.
    """

    starts: list[RunStart] = field(default_factory=list)
    curves: dict[str, list[Point]] = field(default_factory=dict)
    saves: list[SavedCheckpoint] = field(default_factory=list)
    started: Mapping[str, Any] = field(default_factory=dict)
    last: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    status: RunStatus = field(default_factory=RunStatus)
    skipped: int = 0
    evaluated: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fractions(self) -> frozenset[str]:
        """The names of metrics that are fractions between 0 and 1."""
        names = self.started.get("fractions")
        return frozenset(each for each in names if isinstance(each, str)) if isinstance(names, list) else frozenset()

    @property
    def monitor(self) -> str:
        """The name of the metric that selects the best evaluation."""
        return get_text(self.started, "monitor") or "loss"

    @property
    def metric(self) -> EvaluationMetric | None:
        """The monitored metric of the latest evaluation, or the first metric of the task if the loss is monitored."""
        own = [key for key in self.evaluated if _get_curve_name("evaluated", key, uses_model_weights=True) == key]
        name = self.monitor if self.monitor in own else next(iter(own), "")
        value = self.get_evaluation_metric(name)
        return None if value is None else EvaluationMetric(name, value, name in self.fractions)

    @property
    def weights_sha256(self) -> str:
        """The SHA-256 of the final weights, or an empty string if the run isn't done."""
        return get_text(self.last, "weights_sha256") if self.last.get("event") == "done" else ""

    def get_evaluation_metric(self, name: str) -> float | None:
        """Return the loss or another metric of the latest evaluation, or None if it is missing."""
        return _parse_metric(self.evaluated.get(name))

    def get_last_value(self, curve: str) -> float | None:
        """Return the last value of a curve, or None if there is no such curve."""
        points = self.curves.get(curve)
        return points[-1].value if points else None

    def is_fraction(self, curve: str) -> bool:
        """Return whether the values of a curve are fractions between 0 and 1."""
        name = curve.removesuffix(_TRAINING_SUFFIX).removesuffix("/ema")
        return name in self.fractions or name == "mfu"


def get_training_curve_name(metric: str) -> str:
    """Return the name of the training curve of a metric."""
    return f"{metric}{_TRAINING_SUFFIX}"


def get_evaluation_curve_name(metric: str) -> str:
    """Return the name of the evaluation curve of a metric."""
    return f"loss{_VALIDATION_SUFFIX}" if metric == "loss" else metric


def get_metric_name(curve: str) -> str:
    """Return the name of the metric of a training or evaluation curve."""
    return "loss" if curve == get_evaluation_curve_name("loss") else curve.removesuffix(_TRAINING_SUFFIX)


def build_history(events: Iterable[Mapping[str, Any]]) -> History:
    """Return the history of a run from its events. Raises KeyError or ValueError for an invalid event."""
    log = RunLog()
    for event in events:
        log.add(event)
    return log.make_history()


def describe_best_run(histories: Sequence[History]) -> list[str]:
    """Return a string for each run: `by METRIC` for the best run, and an empty string for the rest.

    If all runs are equally good, or don't monitor the same metric, all strings are empty. They are empty too if the
    validation splits have different sizes, because these runs were trained on different datasets.
    """
    judged = [each.get_evaluation_metric(each.monitor) for each in histories]
    values = {value for value in judged if value is not None and not math.isnan(value)}
    # Older logs don't contain `higher`.
    criteria = {
        (each.monitor, str(each.started.get("higher")), each.started.get("validation_samples"))
        for each in histories
        if each.evaluated
    }
    if len(values) < 2 or len(criteria) > 1 or (higher := criteria.pop()[1]) not in ("True", "False"):
        return [""] * len(histories)
    best_value = max(values) if higher == "True" else min(values)
    return [f"by {each.monitor}" if value == best_value else "" for each, value in zip(histories, judged, strict=True)]


@final
class RunLog:
    """Builds the history of a run from its events. Call `add` for each event."""

    def __init__(self) -> None:
        self._starts: list[RunStart] = []
        self._curves: dict[str, ThinnedCurve] = {}
        self._saves: list[SavedCheckpoint] = []
        self._started: Mapping[str, Any] = {}
        self._last: Mapping[str, Any] = {}
        self._skipped: set[str] = set()
        self._loss: float | None = None
        self._evaluated: Mapping[str, Any] = {}
        # Progress at the latest start event and at the step reports since then, limited to the most recent ones.
        self._reports: deque[SpeedSample] = deque(maxlen=_SPEED_REPORTS + 1)
        self._start_time: float | None = None  # time of the latest start event
        # Training time in seconds before the latest start event, and the time of the latest event.
        self._earlier_seconds = self._latest_event_time = 0.0

    def add(self, event: Mapping[str, Any]) -> None:
        """Add the next event of the log.

        Raises KeyError or ValueError if a field is missing or invalid. In this case, the event is ignored.
        """
        _validate(event)
        self._last, kind = event, event.get("event")
        if kind == "skipped" and isinstance(files := event.get("files"), list):
            self._skipped.update(map(str, files))
        if kind == "evaluated":
            self._evaluated = event
        time, step, samples = _get_number(event, "time"), get_count(event, "step"), get_count(event, "samples")
        if time is None or step is None or samples is None:
            return
        if self._start_time is None:
            self._start_time = self._latest_event_time = time
        if kind == "started":
            self._earlier_seconds += max(0.0, self._latest_event_time - self._start_time)
            self._start_time, self._started = time, event
            self._drop_after(step)
            self._reports.clear()
            self._starts.append(_parse_start(event, step, self._earlier_seconds))
        if kind in ("started", "step"):
            self._reports.append(SpeedSample(time, step, samples))
            self._loss = _parse_metric(event.get("loss")) if kind == "step" else self._loss
        self._latest_event_time = time
        seconds = self._seconds
        for name, value in iterate_metrics(event):
            if name in self._curves or len(self._curves) < _MAX_CURVES:
                self._curves.setdefault(name, ThinnedCurve()).append(Point(step, samples, seconds, value))
        if kind == "saved":
            took, best = _get_number(event, "seconds") or 0.0, event.get("best") is True
            self._saves.append(SavedCheckpoint(step, seconds, took, best, get_text(event, "weights_sha256")))

    def make_history(self) -> History:
        """Return the history of the events so far."""
        curves = {name: curve.get_points() for name, curve in self._curves.items()}
        starts, saves = [*self._starts], [*self._saves]
        known = (self._started, self._last, self._seconds, self.make_status(), len(self._skipped), self._evaluated)
        return History(starts, curves, saves, *known)

    def make_status(self) -> RunStatus:
        """Return the progress of the run after the events so far."""
        event, started = self._last, self._started
        step, steps = get_count(event, "step"), get_count(started, "steps")
        per_epoch, epochs = get_count(started, "steps_per_epoch"), _get_number(started, "epochs")
        steps_per_s, samples_per_s = _measure_speed(self._reports)
        return RunStatus(
            last=event.get("event"),
            time=_get_number(event, "time"),
            reason=get_text(event, "reason") if event.get("event") == "stopped" else None,
            step=step,
            steps=steps,
            epoch=-(-step // per_epoch) if step is not None and per_epoch else None,
            epochs=None if epochs is None else math.ceil(epochs),
            samples_per_s=samples_per_s,
            left_s=(steps - step) / steps_per_s if steps_per_s and steps is not None and step is not None else None,
            loss=self._loss,
            figure=History(started=started, evaluated=self._evaluated).metric,
        )

    @property
    def fractions(self) -> frozenset[str]:
        """The names of metrics that are fractions between 0 and 1."""
        return History(started=self._started).fractions

    @property
    def _seconds(self) -> float:
        return self._earlier_seconds + max(0.0, self._latest_event_time - (self._start_time or 0.0))

    def _drop_after(self, step: int) -> None:
        """Drop the points and checkpoints after `step`, because these steps are recomputed."""
        for curve in self._curves.values():
            curve.truncate(step)
        self._saves = [save for save in self._saves if save.step <= step]


def get_text(event: Mapping[str, Any], key: str) -> str:
    """Return a string field of an event in printable form, or an empty string if it is missing."""
    value = event.get(key)
    return printable_line(value) if isinstance(value, str) else ""


def get_count(event: Mapping[str, Any], key: str) -> int | None:
    """Return an integer field of an event, or None if it is missing."""
    value = event.get(key)
    return value if _is_count(value) else None


def iterate_metrics(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the metrics of an event as (curve name, value) pairs. Events without metrics yield nothing."""
    kind, weights = event.get("event"), event.get("weights", "model")
    if isinstance(kind, str) and kind in ("step", "evaluated", "logged"):
        for key, value in event.items():
            if (name := _get_curve_name(kind, key, weights == "model")) and (
                number := _parse_metric(value)
            ) is not None:
                yield name, number


def get_seconds_by_rank(event: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the seconds that each rank spent on each activity, from a `done` event.

    The result maps each activity to a list with an entry for each rank, and is empty if the times are unknown.
    """
    spent = event.get("seconds_by_rank")
    if not isinstance(spent, dict):
        return {}
    numbers = {printable_line(activity): _parse_numbers(seconds) for activity, seconds in spent.items()}
    lengths = {len(seconds) for seconds in numbers.values()}
    return numbers if len(lengths) == 1 else {}


def get_peak_bytes_by_rank(event: Mapping[str, Any]) -> list[float]:
    """Return the peak memory of each rank in bytes from a `done` event, or an empty list if it is unknown."""
    return _parse_numbers(event.get("peak_bytes_by_rank"))


def _validate(event: Mapping[str, Any]) -> None:
    """Raise KeyError or ValueError if a required field is missing or has the wrong type."""
    kind = event.get("event")
    required, validators = (
        (_REQUIRED_FIELDS.get(kind, ()), _VALIDATORS.get(kind, {})) if isinstance(kind, str) else ((), {})
    )
    for key in required:
        if event.get(key) is None:
            raise KeyError(key)
    for key, is_valid in (*_COMMON_VALIDATORS.items(), *validators.items()):
        if (value := event.get(key)) is not None and not is_valid(value):
            raise ValueError(f"{key}: invalid value in an event")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _MAX_COUNT


def _parse_start(event: Mapping[str, Any], step: int, elapsed_s: float) -> RunStart:
    again, processes = get_count(event, "again") or 0, get_count(event, "processes")
    strategy, device, resumed = (
        get_text(event, "strategy"),
        get_text(event, "device"),
        event.get("resumed_from") is not None,
    )
    return RunStart(step, elapsed_s, again, processes, strategy, device, resumed)


def _measure_speed(reports: Sequence[SpeedSample]) -> tuple[float | None, float | None]:
    """Return the steps per second and the samples per second. Both are None if there are too few reports."""
    if len(reports) < 2 or reports[-1].time <= reports[0].time:
        return None, None
    first, last = reports[0], reports[-1]
    seconds = last.time - first.time
    return (last.step - first.step) / seconds, (last.samples - first.samples) / seconds


@lru_cache(maxsize=1_000)  # a log has many events, but few distinct field names
def _get_curve_name(kind: str, key: str, uses_model_weights: bool) -> str:
    """Return the curve name for the field `key` of an event, or an empty string if the field isn't a metric."""
    if kind == "step":
        names = {"loss": get_training_curve_name("loss"), **{name: name for name in _STEP_FIELDS}}
        own, suffix = {each.name for each in fields(Stepped)}, _TRAINING_SUFFIX
    elif kind == "evaluated":
        suffix = "" if uses_model_weights else "/ema"
        names, own = {"loss": get_evaluation_curve_name("loss") + suffix}, {each.name for each in fields(Evaluated)}
    else:
        names, own, suffix = {}, {"step", "epoch", "samples"}, ""
    return names.get(key) or ("" if key in own or key in ("event", "time") else printable_line(key) + suffix)


def _parse_metric(value: Any) -> float | None:
    """Return a metric as a float, which may be non-finite, or None if `value` isn't a number."""
    if type(value) in (int, float):
        return None if abs(value) >= _MAX_MAGNITUDE else float(value)
    return float(value) if value in _NOT_FINITE else None


def _get_number(event: Mapping[str, Any], key: str) -> float | None:
    value: Any = event.get(key)
    return float(value) if _is_number(value) else None


def _parse_numbers(values: Any) -> list[float]:
    found = [_parse_metric(each) for each in values] if isinstance(values, list) else []
    return [each for each in found if each is not None and math.isfinite(each) and each >= 0]


_REQUIRED_FIELDS: Final = {"started": ("time", "step", "samples"), "step": ("loss", "time", "step", "samples")}
_COMMON_VALIDATORS: Final = {"event": _is_text, "time": _is_number, "step": _is_count, "samples": _is_count}
_VALIDATORS: Final[Mapping[str, Mapping[str, Callable[[Any], bool]]]] = {
    "started": {"steps": _is_count, "steps_per_epoch": _is_count, "epochs": _is_number, "monitor": _is_text},
    "step": {"loss": lambda value: _parse_metric(value) is not None},
    "stopped": {"reason": _is_text},
}
