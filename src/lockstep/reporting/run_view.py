"""A run as those see it who look at it from outside, at one moment: its state, its log and its configuration."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from lockstep.common.text import printable_line
from lockstep.errors import EXIT_DONE, EXIT_FAILED, EXIT_SAVED
from lockstep.reporting import wording
from lockstep.reporting.notices import Notice
from lockstep.reporting.run_log import History, RunStatus

State = Literal["queued", "running", "saved", "done", "failed", "died", "unreadable"]

_NO_REASON: Final = "ended without a reason, as SIGKILL or the loss of a host leaves it; see logs/ in the run folder"
STYLES: Final = {"running": "green", "queued": "yellow", "saved": "cyan", "done": ""}  # all others are red
_MOST_NAMES: Final = 5  # of runs that ended alike, in one line
_ACTIVE: Final = ("running", "queued")
_WAITING: Final = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_AT_WORK: Final = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING")
_SHOWN: Final = ("lr", "norm", "mfu")  # of the figures of speed and state, beside all of losses and tasks
_NOT_SHOWN: Final = ("samples_per_s", "loss_scale", "flops_per_s", "peak_bytes")
_MOST: Final = 12  # figures in a line


@dataclass(frozen=True)
class RunView:
    """A run folder, what is known of it, and the number of its last job, with its state in Slurm's queue, in words.

    `recipe` has the values of its recipe as text, by their dotted keys, and `placement` those that the last start had;
    they are empty where nobody knows. `failure` is why the last start failed, if it did, `machine` where it ran, in
    words. `notices` are the last ones, `noticed` how many there were; `is_whole` is false while a long log is read.
    """

    folder: str
    state: State
    history: History = field(default_factory=History)
    job: int | None = None
    queued: str = ""
    recipe: Mapping[str, str] = field(default_factory=dict)
    placement: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""
    machine: str = ""
    notices: tuple[Notice, ...] = ()
    noticed: int = 0
    is_whole: bool = True

    @property
    def status(self) -> RunStatus:
        """How far it is."""
        return self.history.status

    @property
    def name(self) -> str:
        """Its folder, fit to print."""
        return printable_line(self.folder)

    @property
    def is_active(self) -> bool:
        """Whether more is to come without another start."""
        return self.state in _ACTIVE


def state(status: RunStatus, held: bool, submitted: float | None = None, job: str | None = None) -> State:
    """Return the state of a run whose log could be read.

    `held` says whether a process holds the lock of its folder, `submitted` when it was last given to Slurm, and `job`
    Slurm's state of that job: empty where Slurm does not know it any more, None where Slurm is not available.
    """
    if status.last == "done":
        return "done"
    if held or job in _AT_WORK:  # the job may be there before it holds the lock
        return "running"
    if job in _WAITING or (job is None and submitted is not None and submitted > (status.time or 0)):
        return "queued"
    return "saved" if status.last == "stopped" else "died"


def differing(sections: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys in which those recipes or placements differ that are known, in their order."""
    known = [each for each in sections if each]
    keys = dict.fromkeys(key for each in known for key in each)
    return [key for key in keys if len({each.get(key) for each in known}) > 1]


def is_over(run: RunView, wait: bool) -> bool:
    """Return whether nothing more is to come of a run; with `wait` one that is not done may be resumed."""
    return run.is_whole and (run.state == "done" if wait else not run.is_active)


def exit_code(states: Collection[str]) -> int:
    """Return 0 where all runs are done, 75 where the others were saved, else 1: what `lockstep train` exits with."""
    if all(state == "done" for state in states):
        return EXIT_DONE
    return EXIT_SAVED if all(state in ("done", "saved") for state in states) else EXIT_FAILED


def headline(run: RunView) -> str:
    """Say which run it is, in what state and where."""
    starts = run.history.starts[-1:]
    state = "not there yet" if not run.is_whole and not starts else run.state
    where = [f"{each.strategy} on {each.processes or '?'}, {each.device}" for each in starts]
    job = [f"job {run.job} {run.queued}".strip()] if run.job is not None else []
    return join(run.name, state, *where, *job)


def place(run: RunView) -> str:
    """Say how far a run is; empty where it has not begun."""
    status = run.status
    if status.step is None:
        return ""
    epoch = "" if status.epoch is None or status.epochs is None else f"epoch {status.epoch:,}/{status.epochs:,}"
    return join(epoch, f"step {wording.of(status.step, status.steps)}")


def eta(run: RunView) -> str:
    """Say how long a run takes from its last event on; empty where that is not known, or it is over."""
    seconds = run.status.left_s
    return "" if seconds is None or not run.is_active else f"{wording.duration(seconds)} left"


def figures(run: RunView) -> str:
    """Give the speed, and the last of each figure."""
    history, speed = run.history, run.status.samples_per_s
    names = [name for name in history.curves if name not in (*_NOT_SHOWN, *_SHOWN)]
    names += [name for name in _SHOWN if name in history.curves]
    words = [f"{name} {_figure(name, history)}" for name in names[:_MOST]]
    return join("" if speed is None else f"{speed:,.0f} samples/s", *words)


def loss(history: History) -> str:
    """Give the loss of the last evaluation; before there is one that of the last step, and say so."""
    evaluated, trained = history.of_evaluation("loss"), history.status.loss
    if evaluated is not None:
        return wording.loss(evaluated)
    return "" if trained is None else f"train {wording.loss(trained)}"


def line(run: RunView) -> str:
    """Give a run in one line."""
    return join(run.name, place(run), figures(run), eta(run))


def ending(run: RunView) -> str:
    """Say how a run ended."""
    if run.state == "unreadable":
        return f"{run.name} cannot be read: {run.notices[-1].words if run.notices else 'its log is damaged'}"
    if run.state != "done":
        return f"{run.name} {_why(run) or f'is {run.state}'}"
    done = join(f"{run.name} is done in {wording.duration(run.history.seconds)}", place(run), figures(run))
    return f"{done}\n{wording.hash_line(run.history.weights_sha256)}"


def endings(runs: Sequence[RunView]) -> list[str]:
    """Say why runs ended before their end, in a line for those that ended alike."""
    alike: dict[str, list[str]] = {}
    for run in runs:
        alike.setdefault(_why(run), []).append(run.name)
    more = {why: f" and {len(names) - _MOST_NAMES:,} more" for why, names in alike.items() if len(names) > _MOST_NAMES}
    return [f"{', '.join(names[:_MOST_NAMES])}{more.get(why, '')} {why}" for why, names in alike.items() if why]


def latest(runs: Iterable[RunView], most: int) -> list[tuple[str, Notice]]:
    """Return the last notices of some runs with the runs' names, in the order of their times."""
    found = [(run.name, notice) for run in runs for notice in run.notices]
    return sorted(found, key=lambda each: each[1].time or 0.0)[-most:] if most else []


def clock(seconds: float | None) -> str:
    """Return the time of day, in the viewer's time zone; empty for None."""
    return "" if seconds is None else time.strftime("%H:%M:%S", time.localtime(seconds))


def join(*words: str) -> str:
    """Join those words that are not empty."""
    return "  ".join(word for word in words if word)


def _why(run: RunView) -> str:
    """Say why a run ended before its end; empty where it did not."""
    stopped = f"stopped by {run.status.reason or 'a signal'}; another start resumes there"
    return {"failed": f"failed: {run.failure}", "saved": stopped, "died": _NO_REASON}.get(run.state, "")


def _figure(name: str, history: History) -> str:
    value = history.last_of(name)
    if value is None:
        return ""
    return wording.loss(value) if name.startswith("loss/") else wording.figure(value, history.is_share(name))
