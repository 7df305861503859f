"""The sections of a page about one or more runs: tables, charts, and progress bars for runs in progress."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from lockstep.common.text import format_count
from lockstep.reporting import wording
from lockstep.reporting.charts import Chart, make_curve_chart
from lockstep.reporting.page import Paragraphs, ProgressBar, Section, Table, ValueGrid
from lockstep.reporting.run_log import (
    History,
    describe_best_run,
    get_count,
    get_evaluation_curve_name,
    get_metric_name,
    get_training_curve_name,
)
from lockstep.reporting.run_view import (
    RunView,
    describe_endings,
    find_differing_keys,
    format_time_left,
    format_time_of_day,
    get_named_metrics,
    get_named_progress,
    select_latest_notices,
)
from lockstep.reporting.thinning import Point

_FIRST_CHARTS: Final = ("loss",)  # shown before the metrics of the task; _LAST_CHARTS are shown after them
_LAST_CHARTS: Final = {
    "samples_per_s": "samples/s",
    "data_s": "waiting for data, seconds per step",
    "lr": "learning rate",
    "norm": "gradient norm",
    "loss_scale": "loss scale",
    "flops_per_s": "FLOP/s",
    "mfu": "MFU",
    "peak_bytes": "peak memory, MiB",
}
_NOISY_CURVES: Final = ("samples_per_s", "data_s", "norm", "flops_per_s", "mfu")
# For these metrics and for percentages, the y axis starts at zero.
_FROM_ZERO: Final = ("samples_per_s", "data_s", "lr", "flops_per_s", "peak_bytes")
_MAX_KEY_COLUMNS: Final = 3  # if more settings differ between runs, a separate table shows them
_MAX_PROGRESS_BARS: Final = 3  # a live page of more runs has no progress bars
_MAX_ROWS: Final = 50  # maximum number of restarts or checkpoints that are listed for each run
_HASH_CHARS: Final = 12  # hashes are truncated to this length
_MAX_NOTICES: Final = 10
_SAME_RECIPE_NOTE: Final = "All runs have the same recipe, so exact strategies give the same weights."
_TIME_NOTE: Final = "Time is the sum over all starts, without the pauses between them."


def make_sections(runs: Sequence[RunView]) -> list[Section]:
    """Return the sections of a page about runs: results, differences, curves, restarts and checkpoints."""
    return _drop_empty(
        [
            *_make_summary_sections(runs),
            *make_curve_sections(_get_histories(runs)),
            _make_restart_table(runs),
            _make_checkpoint_table(runs),
        ]
    )


def make_live_sections(runs: Sequence[RunView]) -> list[Section]:
    """Return the sections of a live page: progress, curves, latest events, results, restarts and checkpoints.

    Up to three runs have a progress bar and a list of metrics each. For more runs, the progress is shown in the table
    of runs.
    """
    has_bars = len(runs) <= _MAX_PROGRESS_BARS
    summary = _make_summary_sections(runs, with_progress=not has_bars)
    progress: list[Section] = [*map(_make_progress_bar, runs)] if has_bars else summary[:1]
    rest = summary if has_bars else summary[1:]
    if len(runs) == 1:
        known = {name for name, _ in _make_progress_bar(runs[0]).entries}
        rest = [_drop_metrics(each, known) if isinstance(each, ValueGrid) else each for each in rest]
    shown = [
        *progress,
        *make_curve_sections(_get_histories(runs)),
        _make_event_table(runs),
        *rest,
        _make_restart_table(runs),
        _make_checkpoint_table(runs),
    ]
    return _drop_empty(shown)


def make_title(runs: Sequence[RunView]) -> str:
    """Return a short page title. For a single run, it contains the state and progress of the run."""
    if len(runs) != 1:
        return f"{len(runs)} runs"
    [run] = runs
    done = f" {100 * run.status.step // run.status.steps} %" if run.status.step and run.status.steps else ""
    return f"{run.state}{done} {run.folder}"


def make_curve_sections(histories: Mapping[str, History]) -> list[Section]:
    """Return a chart for each metric, with the curves of all runs that reported it.

    Metrics that no run reported more than once are listed in a table at the end instead.
    """
    curves_by_name = [name for each in histories.values() for name in each.curves]
    names = dict.fromkeys(map(get_metric_name, curves_by_name))
    own = [name for name in names if name not in (*_FIRST_CHARTS, *_LAST_CHARTS)]
    requested = [name for name in (*_FIRST_CHARTS, *own, *_LAST_CHARTS) if name in names]
    flops = _get_flops_per_sample(histories)
    if flops and "samples_per_s" in names:
        # The chart of flops_per_s would look the same as that of samples_per_s.
        requested = [name for name in requested if name != "flops_per_s"]
    note = f"FLOP/s is this curve times {wording.format_flops(flops)}, the cost of a sample." if flops else ""
    charts = {
        name: make_metric_chart(name, histories, note=note if name == "samples_per_s" else "") for name in requested
    }
    drawn: list[Section] = [each for each in charts.values() if each is not None]
    logged = {label: each.curves["loss"] for label, each in histories.items() if _has_two_losses(each)}
    if any(len(points) > 1 for points in logged.values()):
        drawn.append(make_curve_chart("loss as logged", logged, "loss", names=[*histories]))
        logged = {}
    single = [
        name
        for name in dict.fromkeys(curves_by_name)
        if (name == "loss" and logged) or (get_metric_name(name) in requested and charts[get_metric_name(name)] is None)
    ]
    return [*drawn, *_make_single_value_sections(histories, single)]


def _has_two_losses(history: History) -> bool:
    """Return whether a custom training loop logged a loss under the name that evaluations use."""
    return {"loss", get_evaluation_curve_name("loss")} <= history.curves.keys()


def make_metric_chart(metric: str, histories: Mapping[str, History], *, note: str = "") -> Chart | None:
    """Return a chart of a metric with the evaluation and training curves of each history.

    Returns None if all curves have fewer than two points.
    """

    def get_curves(curve: str) -> dict[str, Sequence[Point]]:
        return {label: convert_units(each.curves[curve]) for label, each in histories.items() if curve in each.curves}

    def convert_units(points: Sequence[Point]) -> Sequence[Point]:
        return [each._replace(value=each.value / 2**20) for each in points] if metric == "peak_bytes" else points

    evaluation = get_curves(get_evaluation_curve_name(metric)) or get_curves(metric)
    words, training = _LAST_CHARTS.get(metric, metric), get_curves(get_training_curve_name(metric))
    if all(len(points) < 2 for points in (*evaluation.values(), *training.values())):
        return None
    return make_curve_chart(
        words,
        evaluation,
        words,
        training=training,
        names=[*histories],
        percent=any(each.is_fraction(metric) for each in histories.values()),
        from_zero=metric in _FROM_ZERO,
        noisy=metric in _NOISY_CURVES,
        note=note,
    )


def _get_flops_per_sample(histories: Mapping[str, History]) -> int | None:
    """Return the FLOP per sample, or None if it isn't known or differs between runs."""
    known = {get_count(each.started, "flops_per_sample") for each in histories.values() if "flops_per_s" in each.curves}
    return known.pop() if len(known) == 1 else None


def _make_single_value_sections(histories: Mapping[str, History], names: Sequence[str]) -> list[Section]:
    """Return a table of metrics that were reported only once, or a grid of values for a single run."""
    if not names:
        return []
    title = "Reported once"
    headings = [_LAST_CHARTS.get(name, name) for name in names]
    cells = {label: [_format_single_value(name, each) for name in names] for label, each in histories.items()}
    if len(histories) == 1:
        [values] = cells.values()
        return [ValueGrid(title, [*zip(headings, values, strict=True)])]
    return [Table(title, ["run", *headings], [[label, *values] for label, values in cells.items() if any(values)])]


def _format_single_value(metric_name: str, history: History) -> str:
    value = history.get_last_value(metric_name)
    if value is None:
        return ""
    if metric_name == "peak_bytes":
        return f"{value / 2**20:,.0f}"
    if metric_name in ("samples_per_s", "flops_per_s"):
        return f"{value:,.0f}"
    return wording.format_metric(metric_name, value, history.is_fraction(metric_name))


def _make_summary_sections(runs: Sequence[RunView], *, with_progress: bool = False) -> list[Section]:
    ended = describe_endings(runs)
    words = ended + [
        f"{run.name} skipped {format_count(run.history.skipped, 'unreadable file')}; see skipped.txt"
        for run in runs
        if run.history.skipped
    ]
    heading = "Why runs stopped" if ended else ""
    return [*_make_run_sections(runs, with_progress), *([Paragraphs(heading, words)] if words else [])]


def _get_histories(runs: Sequence[RunView]) -> dict[str, History]:
    return {run.folder: run.history for run in runs}


def _drop_empty(sections: Sequence[Section]) -> list[Section]:
    """Return all sections except empty tables and grids."""
    return [
        each
        for each in sections
        if not (isinstance(each, Table) and not each.rows) and not (isinstance(each, ValueGrid) and not each.entries)
    ]


def _drop_metrics(grid: ValueGrid, metric_names: Collection[str]) -> ValueGrid:
    return replace(grid, entries=[(name, value) for name, value in grid.entries if name not in metric_names])


def _make_event_table(runs: Sequence[RunView]) -> Table:
    """Return a table of the latest events. For several runs, the table has a column for the run name."""
    events = [*reversed(select_latest_notices(runs, _MAX_NOTICES))]
    if len(runs) == 1:
        rows = [[format_time_of_day(notice.time), notice.text] for _, notice in events]
        return Table("Latest events", ["time", "event"], rows)
    rows = [[format_time_of_day(notice.time), name, notice.text] for name, notice in events]
    return Table("Latest events", ["time", "run", "event"], rows)


def _make_progress_bar(run: RunView) -> ProgressBar:
    done, total = _count_steps(run)
    return ProgressBar(run.name, done, total, [*get_named_progress(run), *get_named_metrics(run)])


def _count_steps(run: RunView) -> tuple[int, int]:
    """Return the number of completed steps and the total number of steps, which is at least 1."""
    status = run.status
    return status.step or 0, max(status.steps or 0, status.step or 0, 1)


def _make_run_sections(runs: Sequence[RunView], with_progress: bool) -> list[Section]:
    """Return a table of the runs, or a grid of values for a single run.

    If more than three settings differ between the runs, a second table lists them.
    """
    if not runs:
        return []
    figures = dict.fromkeys(run.status.figure.name for run in runs if run.status.figure)
    cells = _make_columns(runs, ["loss/train", "loss/validation", *figures], with_progress)
    if len(runs) == 1:
        return [ValueGrid("Run", [(name, value) for name, [value] in cells.items() if value and name != "run"])]
    notes = [_TIME_NOTE]
    if set(cells["starts"]) <= {"0", "1"}:
        del cells["starts"]
    if len(set(cells["machine"])) == 1:
        [machine] = set(cells.pop("machine"))
        notes += [f"All runs trained on {machine}."] if machine else []
    if not any(cells["best"]):
        del cells["best"]
    names, differences = {"run": cells.pop("run")}, _find_differences(runs)
    is_recipe = any(name.startswith("recipe.") for name in differences)
    same = [_SAME_RECIPE_NOTE] if differences and not is_recipe else []
    done = [step / steps for step, steps in map(_count_steps, runs)] if with_progress else []
    if len(differences) <= _MAX_KEY_COLUMNS:
        cells, notes = names | differences | cells, notes + same
        return [Table("Runs", [*cells], _transpose(cells), " ".join(notes), done=done)]
    cells, differences = names | cells, names | differences
    return [
        Table("Runs", [*cells], _transpose(cells), " ".join(notes), done=done),
        Table("What differs", [*differences], _transpose(differences), " ".join(same)),
    ]


def _make_columns(runs: Sequence[RunView], curves: Sequence[str], with_progress: bool) -> dict[str, list[str]]:
    """Return the columns of the table of runs by heading. Each curve in `curves` has a column with its latest value.

    A value that isn't from the latest step of the run is followed by its step.
    """

    def format_last_value(run: RunView, name: str) -> str:
        points = run.history.curves.get(name)
        if not points:
            return ""
        words = wording.format_metric(name, points[-1].value, run.history.is_fraction(name))
        return words if points[-1].step == run.status.step else f"{words} (step {points[-1].step:,})"

    speeds = [run.status.samples_per_s for run in runs]
    return {
        "run": [run.folder for run in runs],
        "state": [run.state for run in runs],
        "step": [wording.format_fraction(run.status.step, run.status.steps) for run in runs],
        **({"time left": [format_time_left(run) for run in runs]} if with_progress else {}),
        "time": [wording.format_duration(run.history.seconds) if run.history.starts else "" for run in runs],
        **{name: [format_last_value(run, name) for run in runs] for name in curves},
        "best": describe_best_run([run.history for run in runs]),
        "samples/s": ["" if speed is None else f"{speed:,.0f}" for speed in speeds],
        "starts": [f"{len(run.history.starts):,}" for run in runs],
        "weights": [run.history.weights_sha256[:_HASH_CHARS] for run in runs],
        "machine": [run.machine for run in runs],
    }


def _transpose(cells: Mapping[str, Sequence[str]]) -> list[Sequence[str]]:
    """Transpose the columns of a table into rows."""
    return [*zip(*cells.values(), strict=True)]


def _find_differences(runs: Sequence[RunView]) -> dict[str, list[str]]:
    """Return a column of values for each recipe or placement key that differs between the runs."""
    recipe, placement = (
        find_differing_keys([run.recipe for run in runs]),
        find_differing_keys([run.placement for run in runs]),
    )
    of_recipe = {f"recipe.{key}": [run.recipe.get(key, "") for run in runs] for key in recipe}
    return of_recipe | {f"placement.{key}": [run.placement.get(key, "") for run in runs] for key in placement}


def _make_restart_table(runs: Sequence[RunView]) -> Table:
    rows = [
        [
            run.folder,
            f"{start.step:,}",
            wording.format_duration(start.seconds),
            f"{start.strategy} on {start.processes}, {start.device}",
            f"{start.recomputed_steps:,}",
        ]
        for run in runs
        if len(run.history.starts) > 1
        for start in run.history.starts[-_MAX_ROWS:]
    ]
    columns = ["run", "after step", "at", "placement", "steps recomputed"]
    return Table("Restarts", columns, rows, grouped=True, folded=True)


def _make_checkpoint_table(runs: Sequence[RunView]) -> Table:
    rows = [
        [
            run.folder,
            f"{save.step:,}",
            wording.format_duration(save.seconds),
            f"{save.duration_s:.2f} s",
            save.weights_sha256[:_HASH_CHARS],
            "yes" if save.best else "",
            "" if run.checkpoints is None else "kept" if save.step in run.checkpoints else "removed",
        ]
        for run in runs
        for save in run.history.saves[-_MAX_ROWS:]
    ]
    columns = ["run", "after step", "at", "took", "weights", "best when saved", "files"]
    return Table("Checkpoints", columns, rows, grouped=True, folded=True)
