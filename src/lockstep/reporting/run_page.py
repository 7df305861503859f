"""A page about one or more runs, with tables and charts. Runs in progress also have progress bars."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from lockstep.reporting import wording
from lockstep.reporting.charts import Chart, curves
from lockstep.reporting.page import Figures, ProgressBar, Section, Table, Words
from lockstep.reporting.run_log import History, count, evaluation_curve, figure_of, training_curve
from lockstep.reporting.run_view import (
    RunView,
    clock,
    differing,
    endings,
    latest,
    named_metrics,
    named_progress,
    time_left,
)
from lockstep.reporting.thinning import Point

_FIRST_CHARTS: Final = ("loss",)  # the first charts, before the metrics of the task and the charts in _LAST
_LAST_CHARTS: Final = {
    "samples_per_s": "samples/s",
    "lr": "learning rate",
    "norm": "norm of the gradient",
    "loss_scale": "loss scale",
    "flops_per_s": "FLOP/s",
    "mfu": "MFU",
    "peak_bytes": "peak memory, MiB",
}
_NOISY_CURVES: Final = ("samples_per_s", "norm", "flops_per_s", "mfu")
# Metrics whose y axis starts at zero, in addition to percentages.
_FROM_ZERO: Final = ("samples_per_s", "lr", "flops_per_s", "peak_bytes")
_MAX_KEY_COLUMNS: Final = 3  # maximum number of differing keys in the table of runs; more keys are in a separate table
_MAX_PROGRESS_BARS: Final = 3  # maximum number of runs for which a live page shows a progress bar and all metrics
_MAX_ROWS: Final = 50  # maximum number of starts or checkpoints of a run in a table
_HASH_CHARS: Final = 12  # number of characters shown of a hash
_NOTICES: Final = 10
_SAME_RECIPE: Final = "All runs have the same recipe, so exact strategies give the same weights."
_TIME: Final = "Time is the sum over all starts, without the pauses between them."


def sections(runs: Sequence[RunView]) -> list[Section]:
    """Return the sections of a page about runs: results, differences, curves, restarts and checkpoints."""
    return _drop_empty(
        [*_outline(runs), *curve_sections(_histories(runs)), _restart_table(runs), _checkpoint_table(runs)]
    )


def live_sections(runs: Sequence[RunView]) -> list[Section]:
    """Return the sections of a live page: progress, curves, the latest events, and the remaining `sections`.

    If there are few runs, each has a progress bar and all its metrics. If there are many runs, the table of runs shows
    the progress.
    """
    has_bars = len(runs) <= _MAX_PROGRESS_BARS
    outline = _outline(runs, with_progress=not has_bars)
    progress: list[Section] = [*map(_progress, runs)] if has_bars else outline[:1]
    rest = outline if has_bars else outline[1:]
    if len(runs) == 1:
        known = {name for name, _ in _progress(runs[0]).figures}
        rest = [_drop_metrics(each, known) if isinstance(each, Figures) else each for each in rest]
    shown = [
        *progress,
        *curve_sections(_histories(runs)),
        _events(runs),
        *rest,
        _restart_table(runs),
        _checkpoint_table(runs),
    ]
    return _drop_empty(shown)


def title(runs: Sequence[RunView]) -> str:
    """Return a short title. The title of a single run contains its state and progress."""
    if len(runs) != 1:
        return f"{len(runs)} runs"
    [run] = runs
    done = f" {100 * run.status.step // run.status.steps} %" if run.status.step and run.status.steps else ""
    return f"{run.state}{done} {run.folder}"


def curve_sections(histories: Mapping[str, History]) -> list[Section]:
    """Return a chart for each metric, with the curves of all runs that have this metric.

    A metric that no run has reported more than once has no chart. A table at the end contains its value.
    """
    curves_by_name = [name for each in histories.values() for name in each.curves]
    names = dict.fromkeys(map(figure_of, curves_by_name))
    own = [name for name in names if name not in (*_FIRST_CHARTS, *_LAST_CHARTS)]
    asked = [name for name in (*_FIRST_CHARTS, *own, *_LAST_CHARTS) if name in names]
    flops = _flops_per_sample(histories)
    if flops and "samples_per_s" in names:
        # The curve of flops_per_s would have the same shape as samples_per_s.
        asked = [name for name in asked if name != "flops_per_s"]
    note = f"FLOP/s is this curve times {wording.flops(flops)}, the cost of a sample." if flops else ""
    found = {name: chart(name, histories, note=note if name == "samples_per_s" else "") for name in asked}
    drawn: list[Section] = [each for each in found.values() if each is not None]
    logged = {label: each.curves["loss"] for label, each in histories.items() if _has_two_losses(each)}
    if any(len(points) > 1 for points in logged.values()):
        drawn.append(curves("loss, as it was logged", logged, "loss", names=[*histories]))
        logged = {}
    single = [
        name
        for name in dict.fromkeys(curves_by_name)
        if (name == "loss" and logged) or (figure_of(name) in asked and found[figure_of(name)] is None)
    ]
    return [*drawn, *_single_values(histories, single)]


def _has_two_losses(history: History) -> bool:
    """Return whether a custom training loop logged a loss under the name that evaluations use."""
    return {"loss", evaluation_curve("loss")} <= history.curves.keys()


def chart(figure: str, histories: Mapping[str, History], *, note: str = "") -> Chart | None:
    """Return a chart of a metric with the evaluation and training curves of each history.

    Return None if no curve has at least two points.
    """

    def found(curve: str) -> dict[str, Sequence[Point]]:
        return {label: scaled(each.curves[curve]) for label, each in histories.items() if curve in each.curves}

    def scaled(points: Sequence[Point]) -> Sequence[Point]:
        return [each._replace(value=each.value / 2**20) for each in points] if figure == "peak_bytes" else points

    of_figure = found(evaluation_curve(figure)) or found(figure)
    words, training = _LAST_CHARTS.get(figure, figure), found(training_curve(figure))
    if all(len(points) < 2 for points in (*of_figure.values(), *training.values())):
        return None
    return curves(
        words,
        of_figure,
        words,
        training=training,
        names=[*histories],
        percent=any(each.is_share(figure) for each in histories.values()),
        from_zero=figure in _FROM_ZERO,
        noisy=figure in _NOISY_CURVES,
        note=note,
    )


def _flops_per_sample(histories: Mapping[str, History]) -> int | None:
    """Return the FLOP per sample, or None if it isn't known or differs between runs."""
    known = {count(each.started, "flops_per_sample") for each in histories.values() if "flops_per_s" in each.curves}
    return known.pop() if len(known) == 1 else None


def _single_values(histories: Mapping[str, History], names: Sequence[str]) -> list[Section]:
    """Return a table of the metrics that were reported once. For a single run, return a grid instead."""
    if not names:
        return []
    title = "Reported once"
    headings = [_LAST_CHARTS.get(name, name) for name in names]
    cells = {label: [_single_value(name, each) for name in names] for label, each in histories.items()}
    if len(histories) == 1:
        [values] = cells.values()
        return [Figures(title, [*zip(headings, values, strict=True)])]
    return [Table(title, ["run", *headings], [[label, *values] for label, values in cells.items() if any(values)])]


def _single_value(name: str, history: History) -> str:
    value = history.last_value(name)
    if value is None:
        return ""
    if name == "peak_bytes":
        return f"{value / 2**20:,.0f}"
    if name in ("samples_per_s", "flops_per_s"):
        return f"{value:,.0f}"
    return wording.format_metric(name, value, history.is_share(name))


def _outline(runs: Sequence[RunView], *, with_progress: bool = False) -> list[Section]:
    ended = endings(runs)
    words = ended + [
        f"{run.name} skipped {wording.format_count(run.history.skipped, 'unreadable file')}; see skipped.txt"
        for run in runs
        if run.history.skipped
    ]
    heading = "Why runs stopped" if ended else ""
    return [*_runs(runs, with_progress), *([Words(heading, words)] if words else [])]


def _histories(runs: Sequence[RunView]) -> dict[str, History]:
    return {run.folder: run.history for run in runs}


def _drop_empty(shown: Sequence[Section]) -> list[Section]:
    """Return the sections, leaving out empty tables and grids."""
    return [
        each
        for each in shown
        if not (isinstance(each, Table) and not each.rows) and not (isinstance(each, Figures) and not each.figures)
    ]


def _drop_metrics(grid: Figures, names: Collection[str]) -> Figures:
    return replace(grid, figures=[(name, value) for name, value in grid.figures if name not in names])


def _events(runs: Sequence[RunView]) -> Table:
    """Return a table of the latest events. It contains the run names only if there are several runs."""
    events = [*reversed(latest(runs, _NOTICES))]
    if len(runs) == 1:
        rows = [[clock(notice.time), notice.words] for _, notice in events]
        return Table("Latest events", ["time", "event"], rows)
    rows = [[clock(notice.time), name, notice.words] for name, notice in events]
    return Table("Latest events", ["time", "run", "event"], rows)


def _progress(run: RunView) -> ProgressBar:
    done, total = _steps(run)
    return ProgressBar(run.name, done, total, [*named_progress(run), *named_metrics(run)])


def _steps(run: RunView) -> tuple[int, int]:
    """Return the number of completed steps and the total number of steps, which is at least 1."""
    status = run.status
    return status.step or 0, max(status.steps or 0, status.step or 0, 1)


def _runs(runs: Sequence[RunView], with_progress: bool) -> list[Section]:
    """Return a table of the runs. For a single run, return a grid of values instead.

    If more than a few keys differ between the runs, these keys are in a second table.
    """
    if not runs:
        return []
    figures = dict.fromkeys(run.status.figure.name for run in runs if run.status.figure)
    cells = _columns(runs, ["loss/train", "loss/validation", *figures], with_progress)
    if len(runs) == 1:
        return [Figures("Run", [(name, value) for name, [value] in cells.items() if value and name != "run"])]
    notes = [_TIME]
    if set(cells["starts"]) <= {"0", "1"}:
        del cells["starts"]
    if len(set(cells["machine"])) == 1:
        [machine] = set(cells.pop("machine"))
        notes += [f"All runs trained on {machine}."] if machine else []
    names, differences = {"run": cells.pop("run")}, _differences(runs)
    is_recipe = any(name.startswith("recipe.") for name in differences)
    same = [_SAME_RECIPE] if differences and not is_recipe else []
    done = [step / steps for step, steps in map(_steps, runs)] if with_progress else []
    if len(differences) <= _MAX_KEY_COLUMNS:
        cells, notes = names | differences | cells, notes + same
        return [Table("Runs", [*cells], _rows(cells), " ".join(notes), done=done)]
    cells, differences = names | cells, names | differences
    return [
        Table("Runs", [*cells], _rows(cells), " ".join(notes), done=done),
        Table("What differs", [*differences], _rows(differences), " ".join(same)),
    ]


def _columns(runs: Sequence[RunView], curves: Sequence[str], with_progress: bool) -> dict[str, list[str]]:
    """Return the columns of the table of runs. It shows the last value of each curve in `curves`."""

    def value(run: RunView, name: str) -> str:
        last = run.history.last_value(name)
        return "" if last is None else wording.format_metric(name, last, run.history.is_share(name))

    speeds = [run.status.samples_per_s for run in runs]
    return {
        "run": [run.folder for run in runs],
        "state": [run.state for run in runs],
        "step": [wording.of(run.status.step, run.status.steps) for run in runs],
        **({"time left": [time_left(run) for run in runs]} if with_progress else {}),
        "time": [wording.duration(run.history.seconds) if run.history.starts else "" for run in runs],
        **{name: [value(run, name) for run in runs] for name in curves},
        "samples/s": ["" if speed is None else f"{speed:,.0f}" for speed in speeds],
        "starts": [f"{len(run.history.starts):,}" for run in runs],
        "weights": [run.history.weights_sha256[:_HASH_CHARS] for run in runs],
        "machine": [run.machine for run in runs],
    }


def _rows(cells: Mapping[str, Sequence[str]]) -> list[Sequence[str]]:
    """Return the rows of a table from its columns."""
    return [*zip(*cells.values(), strict=True)]


def _differences(runs: Sequence[RunView]) -> dict[str, list[str]]:
    """Return a column for each key that differs between the recipes or placements of the runs."""
    recipe, placement = differing([run.recipe for run in runs]), differing([run.placement for run in runs])
    of_recipe = {f"recipe.{key}": [run.recipe.get(key, "") for run in runs] for key in recipe}
    return of_recipe | {f"placement.{key}": [run.placement.get(key, "") for run in runs] for key in placement}


def _run(run: RunView, shown: Sequence[str]) -> list[str]:
    history, speed = run.history, run.status.samples_per_s
    values = [(name, history.last_value(name)) for name in shown]
    return [
        run.folder,
        run.state,
        wording.of(run.status.step, run.status.steps),
        wording.duration(history.seconds) if history.starts else "",
        *(
            "" if value is None else wording.format_metric(name, value, history.is_share(name))
            for name, value in values
        ),
        "" if speed is None else f"{speed:,.0f}",
        f"{len(history.starts):,}",
        history.weights_sha256[:_HASH_CHARS],
        run.machine,
    ]


def _restart_table(runs: Sequence[RunView]) -> Table:
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
        for start in run.history.starts[-_MAX_ROWS:]
    ]
    columns = ["run", "after step", "at", "placement", "steps recomputed"]
    return Table("Restarts", columns, rows, grouped=True, folded=True)


def _checkpoint_table(runs: Sequence[RunView]) -> Table:
    rows = [
        [
            run.folder,
            f"{save.step:,}",
            wording.duration(save.seconds),
            f"{save.took_s:.2f} s",
            save.weights_sha256[:_HASH_CHARS],
            "yes" if save.best else "",
        ]
        for run in runs
        for save in run.history.saves[-_MAX_ROWS:]
    ]
    columns = ["run", "after step", "at", "took", "weights", "best so far"]
    return Table("Checkpoints", columns, rows, grouped=True, folded=True)
