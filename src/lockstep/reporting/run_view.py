"""A snapshot of a run, for monitoring it from another process: its state, its log and its configuration."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from lockstep.common.text import printable_line
from lockstep.errors import EXIT_DONE, EXIT_FAILED, EXIT_SAVED
from lockstep.reporting import wording
from lockstep.reporting.notices import Notice
from lockstep.reporting.run_log import History, RunStart, RunStatus

RunState = Literal["queued", "running", "saved", "done", "failed", "died", "unreadable"]

_NO_REASON: Final = "ended without recording a reason (killed, out of memory or host lost); see logs/ in the run folder"
STYLES: Final = {"running": "green", "queued": "yellow", "saved": "cyan", "done": ""}  # all other states are red
_MAX_NAMES: Final = 5  # maximum number of run names in a line
_ACTIVE_STATES: Final = ("running", "queued")
_QUEUED_STATES: Final = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_RUNNING_STATES: Final = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING")
_SHOWN_CURVES: Final = ("lr", "norm", "mfu")  # shown in addition to losses and the metrics of the task
_HIDDEN_CURVES: Final = ("samples_per_s", "data_s", "loss_scale", "flops_per_s", "peak_bytes")
_MAX_METRICS: Final = 12  # maximum number of metrics in a line
_SPEED: Final = "samples/s"


@dataclass(frozen=True)
class RunView:
    """The state, history and configuration of a run, as read from its run folder.

    - `job`: The ID of the latest Slurm job.
    - `job_state`: The state of that job as text.
    - `recipe`, `placement`: Values as text by dotted key, or empty if unknown.
    - `failure`: The error if the run failed. Like `placement`, it is from the latest start of the run.
    - `machine`: A description of the machine.
    - `notices`, `notice_count`: The latest notices, and the total number of notices.
    - `is_fully_read`: False while a long log is still being read.
    - `checkpoints`: The steps of the checkpoints in the run folder, or None if unknown.
    - `resume_command`: The command that resumes the run, or empty for a custom training loop.
    """

    folder: str
    state: RunState
    history: History = field(default_factory=History)
    job: int | None = None
    job_state: str = ""
    recipe: Mapping[str, str] = field(default_factory=dict)
    placement: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""
    machine: str = ""
    notices: tuple[Notice, ...] = ()
    notice_count: int = 0
    is_fully_read: bool = True
    checkpoints: frozenset[int] | None = None
    resume_command: str = ""

    @property
    def status(self) -> RunStatus:
        """The progress of the run."""
        return self.history.status

    @property
    def name(self) -> str:
        """The path of the run folder as printable text."""
        return printable_line(self.folder)

    @property
    def is_active(self) -> bool:
        """Whether the run is running or queued."""
        return self.state in _ACTIVE_STATES


def determine_state(
    status: RunStatus, is_locked: bool, submit_time: float | None = None, job_state: str | None = None
) -> RunState:
    """Return the state of a run with a readable log.

    `is_locked` is whether a process holds the lock of the run folder. `submit_time` is the time of the latest
    submission to Slurm. `job_state` is the Slurm state of that job. It is empty if Slurm no longer knows the job, and
    None if Slurm isn't available.
    """
    if status.last == "done":
        return "done"
    if is_locked or job_state in _RUNNING_STATES:  # a job that has just started doesn't hold the lock yet
        return "running"
    if job_state in _QUEUED_STATES or (
        job_state is None and submit_time is not None and submit_time > (status.time or 0)
    ):
        return "queued"
    return "saved" if status.last == "stopped" else "died"


def find_differing_keys(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values differ between runs. Runs without known settings are ignored."""
    known = [each for each in settings if each]
    keys = dict.fromkeys(key for each in known for key in each)
    return [key for key in keys if len({each.get(key) for each in known}) > 1]


def is_over(run: RunView, wait_for_completion: bool) -> bool:
    """Return whether a run has ended. If `wait_for_completion` is set, only a completed run counts as ended."""
    return run.is_fully_read and (run.state == "done" if wait_for_completion else not run.is_active)


def get_exit_code(states: Collection[str]) -> int:
    """Return the exit code for runs in these states: 0 if all are done, 75 if all are done or saved, else 1."""
    if all(state == "done" for state in states):
        return EXIT_DONE
    return EXIT_SAVED if all(state in ("done", "saved") for state in states) else EXIT_FAILED


def format_headline(run: RunView) -> str:
    """Return the name, placement, state and job of a run as a line of text."""
    starts = run.history.starts[-1:]
    state = "not there yet" if not run.is_fully_read and not starts else run.state
    where = [_format_placement(each) for each in starts]
    job = [f"job {run.job} {run.job_state}".strip()] if run.job is not None else []
    return join_nonempty(run.name, state, *where, *job)


def format_progress(run: RunView) -> str:
    """Return the progress of a run as text, or an empty string if it hasn't started."""
    status = run.status
    if status.step is None:
        return ""
    epoch = "" if status.epoch is None or status.epochs is None else f"epoch {status.epoch:,}/{status.epochs:,}"
    return join_nonempty(epoch, f"step {wording.format_fraction(status.step, status.steps)}")


def format_time_left(run: RunView) -> str:
    """Return the remaining time as text, or an empty string if it is unknown or the run is over."""
    seconds = run.status.left_s
    return "" if seconds is None or not run.is_active else wording.format_duration(seconds)


def format_eta(run: RunView) -> str:
    """Return the remaining time as text, such as `1:23 left`, or an empty string if it is unknown."""
    return f"{format_time_left(run)} left" if format_time_left(run) else ""


def format_metrics(run: RunView) -> str:
    """Return the training speed and the latest value of each metric as a line of text."""
    words = [f"{value} {name}" if name == _SPEED else f"{name} {value}" for name, value in get_named_metrics(run)]
    return join_nonempty(*words)


def get_named_metrics(run: RunView) -> list[tuple[str, str]]:
    """Return the training speed and the latest value of each metric as (name, text) pairs."""
    history, speed = run.history, run.status.samples_per_s
    names = [name for name in history.curves if name not in (*_HIDDEN_CURVES, *_SHOWN_CURVES)]
    names += [name for name in _SHOWN_CURVES if name in history.curves]
    speeds = [] if speed is None else [(_SPEED, f"{speed:,.0f}")]
    return [*speeds, *((name, _format_last_value(name, history)) for name in names[:_MAX_METRICS])]


def get_named_progress(run: RunView) -> list[tuple[str, str]]:
    """Return the state, placement and progress of a run as (name, text) pairs. Unknown values are omitted."""
    status = run.status
    entries = [
        ("state", run.state if run.is_fully_read else "reading its log"),
        ("placement", next((_format_placement(each) for each in run.history.starts[-1:]), "")),
        ("job", "" if run.job is None else f"{run.job} {run.job_state}".strip()),
        ("epoch", wording.format_fraction(status.epoch, status.epochs)),
        ("step", wording.format_fraction(status.step, status.steps)),
        ("time left", format_time_left(run)),
        ("last event", format_time_of_day(status.time)),
    ]
    return [(name, value) for name, value in entries if value]


def format_loss(history: History) -> str:
    """Return the loss of the latest evaluation as text, or of the latest step before the first evaluation."""
    evaluated, trained = history.get_evaluation_metric("loss"), history.status.loss
    if evaluated is not None:
        return wording.format_loss(evaluated)
    return "" if trained is None else f"train {wording.format_loss(trained)}"


def format_status_line(run: RunView) -> str:
    """Return the name, progress, metrics and remaining time of a run as a line of text."""
    return join_nonempty(run.name, format_progress(run), format_metrics(run), format_eta(run))


def describe_ending(run: RunView) -> str:
    """Return a message about how a run ended."""
    if run.state == "unreadable":
        return f"{run.name} cannot be read: {run.notices[-1].text if run.notices else 'its log is damaged'}"
    if run.state != "done":
        return f"{run.name} {_describe_end(run) or f'is {run.state}'}"
    done = join_nonempty(
        f"{run.name} is done in {wording.format_duration(run.history.seconds)}",
        format_progress(run),
        format_metrics(run),
    )
    return f"{done}\n{wording.format_hash_line(run.history.weights_sha256)}"


def describe_endings(runs: Sequence[RunView]) -> list[str]:
    """Return lines with the reasons why runs ended early. Runs with the same reason share a line."""
    names_by_reason: dict[str, list[str]] = {}
    for run in runs:
        names_by_reason.setdefault(_describe_end(run), []).append(run.name)
    more = {
        reason: f" and {len(names) - _MAX_NAMES:,} more"
        for reason, names in names_by_reason.items()
        if len(names) > _MAX_NAMES
    }
    return [
        f"{', '.join(names[:_MAX_NAMES])}{more.get(reason, '')} {reason}"
        for reason, names in names_by_reason.items()
        if reason
    ]


def select_latest_notices(runs: Iterable[RunView], max_count: int) -> list[tuple[str, Notice]]:
    """Return the latest notices of all runs, at most `max_count`, as (run name, notice) pairs sorted by time."""
    found = [(run.name, notice) for run in runs for notice in run.notices]
    return sorted(found, key=lambda each: each[1].time or 0.0)[-max_count:] if max_count else []


def format_time_of_day(seconds: float | None) -> str:
    """Return the local time of day as text, or an empty string for None."""
    return "" if seconds is None else time.strftime("%H:%M:%S", time.localtime(seconds))


def join_nonempty(*words: str) -> str:
    """Join the non-empty strings with two spaces."""
    return "  ".join(word for word in words if word)


def _format_placement(start: RunStart) -> str:
    return f"{start.strategy} on {start.processes or '?'}, {start.device}"


def _describe_end(run: RunView) -> str:
    """Return the reason why a run ended early, or an empty string if it didn't."""
    resume = f"to resume: {run.resume_command}" if run.resume_command else "start it again to resume"
    stopped = f"stopped by {run.status.reason or 'a signal'}; {resume}"
    return {"failed": f"failed: {run.failure}", "saved": stopped, "died": _NO_REASON}.get(run.state, "")


def _format_last_value(name: str, history: History) -> str:
    value = history.get_last_value(name)
    return "" if value is None else wording.format_metric(name, value, history.is_fraction(name))
