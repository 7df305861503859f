"""A page about any number of runs, with tables and charts. For runs in progress, it also shows progress bars."""

from collections.abc import Mapping, Sequence
from typing import Final

from lockstep.reporting import wording
from lockstep.reporting.charts import Chart, curves
from lockstep.reporting.page import ProgressBar, Section, Table, Words
from lockstep.reporting.run_log import History, evaluation_curve, figure_of, training_curve
from lockstep.reporting.run_view import RunView, clock, differing, endings, eta, figures, headline, join, latest, place
from lockstep.reporting.thinning import Point

_FIRST: Final = ("loss",)  # the first charts; then those of the task's figures, and then those in _LAST
_LAST: Final = {
    "samples_per_s": "samples/s",
    "lr": "learning rate",
    "norm": "norm of the gradient",
    "loss_scale": "loss scale",
    "flops_per_s": "FLOP/s",
    "mfu": "MFU",
    "peak_bytes": "peak memory, MiB",
}
_NOISY: Final = ("samples_per_s", "norm", "flops_per_s", "mfu")
_MOST_ROWS: Final = 50  # the last starts or checkpoints of a run that a table shows
_SHOWN: Final = 12  # characters of a hash
_NOTICES: Final = 10
_PLACEMENT: Final = "The recipes are the same: under exact strategies, so are the bits."


def sections(runs: Sequence[RunView]) -> list[Section]:
    """Return the sections of a page about runs: results, differences, curves, restarts and checkpoints."""
    return _filled([*_outline(runs), *charts(_histories(runs)), _starts(runs), _saves(runs)])


def live_sections(runs: Sequence[RunView]) -> list[Section]:
    """Return the sections of a live page: progress, curves, the last notices, and the rest of `sections`."""
    rows = [[notice.words, name, clock(notice.time)] for name, notice in reversed(latest(runs, _NOTICES))]
    told = Table("What happened last", ["", "run", "at"], rows)
    shown = [*map(_progress, runs), *charts(_histories(runs)), told, *_outline(runs), _starts(runs), _saves(runs)]
    return _filled(shown)


def title(runs: Sequence[RunView]) -> str:
    """Return a short title. For a single run, it contains the state and progress."""
    if len(runs) != 1:
        return f"{len(runs)} runs"
    [run] = runs
    done = f" {100 * run.status.step // run.status.steps} %" if run.status.step and run.status.steps else ""
    return f"{run.state}{done} {run.folder}"


def charts(histories: Mapping[str, History]) -> list[Chart]:
    """Return a chart of each figure, with the curves of all runs that have it."""
    names = dict.fromkeys(figure_of(name) for each in histories.values() for name in each.curves)
    own = [name for name in names if name not in (*_FIRST, *_LAST)]
    found = [chart(name, histories) for name in (*_FIRST, *own, *_LAST) if name in names]
    both = {
        label: each.curves["loss"]
        for label, each in histories.items()
        if {"loss", evaluation_curve("loss")} <= each.curves.keys()
    }
    return [*found, *([curves("loss, as it was logged", both, "loss")] if both else [])]


def chart(figure: str, histories: Mapping[str, History]) -> Chart:
    """Return a chart of a figure with the evaluation and training curves of each history."""

    def found(curve: str) -> dict[str, Sequence[Point]]:
        return {label: scaled(each.curves[curve]) for label, each in histories.items() if curve in each.curves}

    def scaled(points: Sequence[Point]) -> Sequence[Point]:
        return [each._replace(value=each.value / 2**20) for each in points] if figure == "peak_bytes" else points

    of_figure = found(evaluation_curve(figure)) or found(figure)
    percent = any(each.is_share(figure) for each in histories.values())
    words, training = _LAST.get(figure, figure), found(training_curve(figure))
    return curves(words, of_figure, words, training=training, percent=percent, noisy=figure in _NOISY)


def _outline(runs: Sequence[RunView]) -> list[Section]:
    words = endings(runs) + [
        f"{run.folder} skipped {wording.format_count(run.history.skipped, 'file')} that cannot be read: see skipped.txt"
        for run in runs
        if run.history.skipped
    ]
    return [_runs(runs), *([Words("", words)] if words else []), _differences(runs)]


def _histories(runs: Sequence[RunView]) -> dict[str, History]:
    return {run.folder: run.history for run in runs}


def _filled(shown: Sequence[Section]) -> list[Section]:
    """Return the sections without empty tables."""
    return [each for each in shown if not isinstance(each, Table) or each.rows]


def _progress(run: RunView) -> ProgressBar:
    status = run.status
    last = "" if status.time is None else f"last event at {clock(status.time)}"
    lines = ["" if run.is_whole else "reading its log", join(place(run), eta(run), last), figures(run)]
    total = max(status.steps or 0, status.step or 0, 1)
    return ProgressBar(headline(run), status.step or 0, total, [line for line in lines if line])


def _runs(runs: Sequence[RunView]) -> Table:
    figures = dict.fromkeys(run.status.figure.name for run in runs if run.status.figure)
    shown = ["loss/train", "loss/validation", *figures]
    columns = ["run", "state", "step", "time", *shown, "samples/s", "starts", "weights", "machine"]
    rows = [_run(run, shown) for run in runs]
    return Table("Runs", columns, rows, "Time is that of all starts, without pauses.")


def _run(run: RunView, shown: Sequence[str]) -> list[str]:
    history, speed = run.history, run.status.samples_per_s
    values = [(name, history.last_of(name)) for name in shown]
    return [
        run.folder,
        run.state,
        wording.of(run.status.step, run.status.steps),
        wording.duration(history.seconds) if history.starts else "",
        *("" if value is None else wording.figure(value, name in history.fractions) for name, value in values),
        "" if speed is None else f"{speed:,.0f}",
        f"{len(history.starts):,}",
        history.weights_sha256[:_SHOWN],
        run.machine,
    ]


def _differences(runs: Sequence[RunView]) -> Table:
    """Return a table with a column for each key that differs between recipes or placements."""
    recipe, placement = differing([run.recipe for run in runs]), differing([run.placement for run in runs])
    columns = ["run", *(f"recipe.{key}" for key in recipe), *(f"placement.{key}" for key in placement)]
    rows = [
        [run.folder, *(run.recipe.get(key, "") for key in recipe), *(run.placement.get(key, "") for key in placement)]
        for run in runs
    ]
    return Table("What differs", columns, rows if len(columns) > 1 else [], "" if recipe else _PLACEMENT)


def _starts(runs: Sequence[RunView]) -> Table:
    rows = [
        [
            run.folder,
            f"{start.step:,}",
            wording.duration(start.seconds),
            f"{start.strategy} on {start.processes}, {start.device}",
            f"{start.again:,}",
        ]
        for run in runs
        if len(run.history.starts) > 1
        for start in run.history.starts[-_MOST_ROWS:]
    ]
    return Table("Restarts", ["run", "after step", "at", "placement", "steps recomputed"], rows)


def _saves(runs: Sequence[RunView]) -> Table:
    rows = [
        [
            run.folder,
            f"{save.step:,}",
            wording.duration(save.seconds),
            f"{save.took_s:.2f} s",
            save.weights_sha256[:_SHOWN],
            "best so far" if save.best else "",
        ]
        for run in runs
        for save in run.history.saves[-_MOST_ROWS:]
    ]
    return Table("Checkpoints", ["run", "after step", "at", "took", "weights", ""], rows)
