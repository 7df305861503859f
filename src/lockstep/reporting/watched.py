"""A run that is watched, at one moment, and in words: how far it is, its figures, and how it ended."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lockstep.common.text import printable_line
from lockstep.errors import EXIT_DONE, EXIT_FAILED, EXIT_SAVED
from lockstep.reporting import wording
from lockstep.reporting.history import History
from lockstep.reporting.notices import Notice
from lockstep.reporting.overview import NO_REASON, Run
from lockstep.reporting.run_page import Reported

_GOING = ("running", "queued")
_SHOWN = ("lr", "norm", "mfu")  # of the figures of speed and state, beside all of losses and tasks
_NOT_SHOWN = ("samples_per_s", "loss_scale", "flops_per_s", "peak_bytes")
_MOST = 12  # figures in a line


@dataclass(frozen=True)
class Watched:
    """A run with its log so far.

    `notices` are the last ones, `noticed` how many there were; `is_whole` is false while a long log is being read.
    """

    reported: Reported
    notices: tuple[Notice, ...]
    noticed: int
    is_whole: bool

    @property
    def run(self) -> Run:
        """The run, as in a table of several."""
        return self.reported.run

    @property
    def history(self) -> History:
        """Its log."""
        return self.reported.history

    @property
    def name(self) -> str:
        """Its folder, fit to print."""
        return printable_line(self.run.folder)


def is_over(watched: Watched, wait: bool) -> bool:
    """Return whether nothing more is to come of a run; with `wait` one that is not done may be resumed."""
    return watched.is_whole and (watched.run.state == "done" if wait else watched.run.state not in _GOING)


def exit_code(states: Collection[str]) -> int:
    """Return 0 where all runs are done, 75 where the others were saved, else 1: what `lockstep train` exits with."""
    if all(state == "done" for state in states):
        return EXIT_DONE
    return EXIT_SAVED if all(state in ("done", "saved") for state in states) else EXIT_FAILED


def headline(watched: Watched) -> str:
    """Say which run it is, in what state and where."""
    run, started = watched.run, watched.history.starts[-1:]
    state = "not there yet" if not watched.is_whole and not started else run.state
    where = [f"{each.strategy} on {each.processes or '?'}, {each.device}" for each in started]
    job = [f"job {run.job} {run.queued}".strip()] if run.job is not None else []
    return "  ".join([watched.name, state, *where, *job])


def place(watched: Watched) -> str:
    """Say how far a run is; empty where it has not begun."""
    status = watched.run.status
    if status.step is None:
        return ""
    of = "" if status.steps is None else f"/{status.steps:,}"
    epoch = [] if status.epoch is None or status.epochs is None else [f"epoch {status.epoch:,}/{status.epochs:,}"]
    return "  ".join([*epoch, f"step {status.step:,}{of}"])


def left(watched: Watched) -> str:
    """Say how long a run takes from its last event on; empty where that is not known, or it is over."""
    seconds = watched.run.status.left_s
    return "" if seconds is None or watched.run.state not in _GOING else f"{wording.duration(seconds)} left"


def figures(watched: Watched) -> str:
    """Give the speed, and the last of each figure."""
    history, speed = watched.history, watched.run.status.samples_per_s
    names = [name for name in history.curves if name not in (*_NOT_SHOWN, *_SHOWN)]
    names += [name for name in _SHOWN if name in history.curves]
    words = [f"{name} {_figure(name, history)}" for name in names[:_MOST]]
    return "  ".join([*([] if speed is None else [f"{speed:,.0f} samples/s"]), *words])


def line(watched: Watched) -> str:
    """Give a run in one line."""
    return "  ".join(word for word in (watched.name, place(watched), figures(watched), left(watched)) if word)


def ending(watched: Watched) -> str:
    """Say how a run ended."""
    run, last = watched.run, watched.notices[-1:]
    match run.state:
        case "died":
            after = f" after step {run.status.step:,}" if run.status.step is not None else ""
            return f"{watched.name} failed{after}: {run.failure}" if run.failure else f"{watched.name} {NO_REASON}"
        case "unreadable":
            return f"{watched.name} cannot be read: {last[0].words if last else 'its log is damaged'}"
        case "saved":
            return f"{watched.name} {last[0].words if last else 'stopped'}; another start resumes there"
        case "done":
            took = wording.duration(watched.history.seconds)
            sha256 = wording.hash_line(watched.history.weights_sha256)
            return f"{watched.name} is done in {took}  {place(watched)}  {figures(watched)}\n{sha256}"
    return f"{watched.name} is {run.state}"


def told(watched: Iterable[Watched]) -> list[tuple[str, Notice]]:
    """Return the last notices of some runs with the runs' names, in the order of their times."""
    found = [(each.name, notice) for each in watched for notice in each.notices]
    return sorted(found, key=lambda each: each[1].time or 0.0)


def _figure(name: str, history: History) -> str:
    value = history.last_of(name)
    if value is None:
        return ""
    share = name.removesuffix("/train").removesuffix("/ema")
    if name.startswith("loss/"):
        return f"{value:.4f}"
    return wording.figure(value, share in history.fractions or share == "mfu")
