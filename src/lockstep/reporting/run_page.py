"""Any number of runs side by side, as the tables and charts of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lockstep.reporting import wording
from lockstep.reporting.charts import Chart, curves
from lockstep.reporting.history import History
from lockstep.reporting.overview import Run, differing
from lockstep.reporting.page import Section, Table, Words

_FIRST: Final = ("loss/train", "loss/validation")  # of the charts; then the task's figures, and how fast it went
_LAST: Final = ("samples_per_s", "lr", "norm", "loss_scale", "flops_per_s", "mfu", "peak_bytes")
_MOST_ROWS: Final = 50  # of a run's starts or checkpoints in a table: the last ones
_SHOWN: Final = 12  # digits of a hash


@dataclass(frozen=True)
class Reported:
    """A run with its log, its configuration as text by dotted keys, and its machine in words."""

    run: Run
    history: History
    placement: Mapping[str, str]
    machine: str = ""


def sections(found: Sequence[Reported]) -> list[Section]:
    """Return what a page on the runs shows: how each ended, in what they differ, their curves, starts, checkpoints."""
    failures = [f"{each.run.folder} failed: {each.run.failure}" for each in found if each.run.failure]
    shown: list[Section] = [_runs(found), *([Words("", failures)] if failures else [])]
    shown += [_differences(found), *charts(found), _starts(found), _saves(found)]
    return [each for each in shown if not isinstance(each, Table) or each.rows]


def charts(found: Sequence[Reported]) -> list[Chart]:
    """Return a chart of each figure, with a curve of each run that has it."""
    names = dict.fromkeys(name for each in found for name in each.history.curves)
    own = [name for name in names if name not in (*_FIRST, *_LAST)]
    ordered = [name for name in (*_FIRST, *own, *_LAST) if name in names]
    return [_chart(name, found) for name in ordered]


def _chart(name: str, found: Sequence[Reported]) -> Chart:
    lines = {each.run.folder: each.history.curves[name] for each in found if name in each.history.curves}
    share = name.removesuffix("/train").removesuffix("/ema")
    percent = share == "mfu" or any(share in each.history.fractions for each in found)
    return curves(name, lines, name, percent=percent)


def _runs(found: Sequence[Reported]) -> Table:
    monitors = dict.fromkeys(each.history.monitor for each in found if each.history.started)
    figures = [name for name in monitors if name != "loss"]
    columns = ["run", "state", "step", "time", "loss/train", "loss/validation", *figures, "samples/s", "starts"]
    rows = [_run(each, figures) for each in found]
    return Table("Runs", [*columns, "weights", "machine"], rows, "Time is that of all starts, without pauses.")


def _run(each: Reported, figures: Sequence[str]) -> list[str]:
    run, history = each.run, each.history
    step, steps = run.status.step, run.status.steps
    speed = run.status.samples_per_s
    return [
        run.folder,
        run.state,
        "" if step is None else f"{step:,}/{steps:,}" if steps is not None else f"{step:,}",
        wording.duration(history.seconds) if history.starts else "",
        *(_value(history, name) for name in ("loss/train", "loss/validation", *figures)),
        "" if speed is None else f"{speed:,.0f}",
        f"{len(history.starts):,}",
        history.weights_sha256[:_SHOWN],
        each.machine,
    ]


def _value(history: History, name: str) -> str:
    value = history.last_of(name)
    return "" if value is None else wording.figure(value, name in history.fractions)


def _differences(found: Sequence[Reported]) -> Table:
    """Return the keys in which recipes and placements differ, a column for each."""
    recipe = differing([each.run for each in found])
    keys = dict.fromkeys(key for each in found for key in each.placement)
    placement = [key for key in keys if len({each.placement.get(key) for each in found}) > 1]
    rows = [
        [
            each.run.folder,
            *(each.run.recipe.get(key, "") for key in recipe),
            *(each.placement.get(key, "") for key in placement),
        ]
        for each in found
    ]
    columns = ["run", *(f"recipe.{key}" for key in recipe), *(f"placement.{key}" for key in placement)]
    note = "" if recipe else _PLACEMENT
    return Table("What differs", columns, rows if len(columns) > 1 else [], note)


def _starts(found: Sequence[Reported]) -> Table:
    rows = [
        [
            each.run.folder,
            f"{start.step:,}",
            wording.duration(start.seconds),
            f"{start.strategy} on {start.processes}, {start.device}",
            f"{start.again:,}",
        ]
        for each in found
        if len(each.history.starts) > 1
        for start in each.history.starts[-_MOST_ROWS:]
    ]
    return Table("Restarts", ["run", "after step", "at", "placement", "steps recomputed"], rows)


def _saves(found: Sequence[Reported]) -> Table:
    rows = [
        [
            each.run.folder,
            f"{save.step:,}",
            wording.duration(save.seconds),
            f"{save.took_s:.2f} s",
            save.weights_sha256[:_SHOWN],
            "best so far" if save.best else "",
        ]
        for each in found
        for save in each.history.saves[-_MOST_ROWS:]
    ]
    return Table("Checkpoints", ["run", "after step", "at", "took", "weights", ""], rows)


_PLACEMENT: Final = "The recipes are the same: under exact strategies, so are the bits."
