"""Creates page sections with metrics and example outputs of saved runs.

Each run is evaluated in this process. The task of the run determines which examples are shown.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from lockstep.comm.named_sums import NamedSums
from lockstep.errors import LockstepError, UsageError
from lockstep.inference.confusions import make_confusion_sections
from lockstep.inference.mistakes import make_mistake_sections
from lockstep.inference.perplexity import compute_loss_by_position, make_text_samples
from lockstep.inference.residuals import make_residual_sections
from lockstep.inference.saved import SavedModel
from lockstep.inference.validation_pass import EvaluatedBatch, Validation, open_validation
from lockstep.reporting import wording
from lockstep.reporting.charts import RUNS, make_line_chart
from lockstep.reporting.page import Paragraphs, Section, Table
from lockstep.reporting.run_log import History, get_evaluation_curve_name
from lockstep.reporting.run_view import RunView
from lockstep.tasks.classification import Classification
from lockstep.tasks.language import Language
from lockstep.tasks.regression import Regression
from lockstep.tasks.segmentation import Segmentation

_LOG_COLUMN: Final = "compared with the log"
_METRICS_NOTE: Final = (
    "Each checkpoint was evaluated by one process. If all samples were evaluated, the last column compares the metrics "
    "with the metrics that the run logged after the same step. Otherwise, the samples are evenly spaced."
)
_POSITION_NOTE: Final = "The mean loss of the validation tokens that have this many tokens before them."


Curve = Sequence[tuple[float, float]]


class Inspection(NamedTuple):
    """The sections of a report with --examples, and an error message for each run that couldn't be evaluated."""

    sections: list[Section]
    problems: list[str]


class _RunInspection(NamedTuple):
    """The results of a run: its row in the metrics table, its sections, and, for language models, its loss curve."""

    row: Mapping[str, str]
    sections: list[Section]
    loss_curve: Curve


def inspect_runs(
    runs: Sequence[RunView], max_samples: int, open_run: Callable[[str], SavedModel], notify: Callable[[str], None]
) -> Inspection:
    """Evaluate the checkpoint of each run on at most `max_samples` validation samples, and return the page sections.

    `open_run` opens the checkpoint of a run folder. `notify` is called with messages about each run. Data isn't
    downloaded. Raises UsageError if no run can be evaluated. If only some runs can't be evaluated, the sections contain
    the reasons.
    """
    inspections: dict[str, _RunInspection] = {}
    problems: dict[str, str] = {}
    for run in runs:
        folder = run.folder
        try:
            inspections[folder] = _inspect_run(open_run(folder), folder, run.history, max_samples, notify)
        except LockstepError as error:
            problems[folder] = str(error)
    if not inspections:
        raise UsageError("\n".join(f"--examples: {reason}" for reason in problems.values()))
    sections: list[Section] = [_make_metrics_table([inspection.row for inspection in inspections.values()])]
    if problems:
        sections.append(Paragraphs("", [f"No results of {folder}: {reason}" for folder, reason in problems.items()]))
    if curves := {folder: inspection.loss_curve for folder, inspection in inspections.items() if inspection.loss_curve}:
        x, y = "preceding tokens in the context", "loss"
        names = [run.folder for run in runs]  # includes runs without a curve, so that colors match the other charts
        sections.append(
            make_line_chart(
                "Loss by position",
                x,
                y,
                curves,
                names=names,
                legend=RUNS,
                note=_POSITION_NOTE,
                from_zero=False,
            )
        )
    run_sections = [(folder, section) for folder, inspection in inspections.items() for section in inspection.sections]
    if len(runs) == 1:  # the page title already contains the run name
        run_sections = [
            (run, replace(section, title=section.title.removeprefix(f"{run}: "))) for run, section in run_sections
        ]
    sections += [section for _, section in run_sections]
    return Inspection(sections, [*problems.values()])


def _inspect_run(
    saved: SavedModel, run_folder: str, history: History, max_samples: int, notify: Callable[[str], None]
) -> _RunInspection:
    for line in saved.messages:
        notify(line)
    validation = open_validation(saved, max_samples)
    task, count, total = validation.task, len(validation.sample_indices), len(validation.split)
    notify(f"{saved.description}: evaluating {count:,} of {total:,} validation samples on {validation.model.device}")
    sums = NamedSums()
    sections, curve = _inspect_task(run_folder, saved, validation, validation.iterate_batches(sums))
    metrics = validation.compute_metrics(sums)
    row = {
        "run": run_folder,
        "after step": f"{saved.step:,}",
        "weights": saved.weights,
        "samples": f"{count:,} of {total:,}",
        **{name: wording.format_value(value, name in task.fractions) for name, value in metrics.items()},
        _LOG_COLUMN: _compare_with_log(saved, history, metrics) if count == total else "",
    }
    return _RunInspection(row, sections, curve)


def _inspect_task(
    folder: str, saved: SavedModel, validation: Validation, batches: Iterator[EvaluatedBatch]
) -> tuple[list[Section], Curve]:
    """Return the sections for the task of a run and, for language models, the loss by position in the context.

    All batches are consumed, so that the metrics of the evaluation are complete.
    """
    match task := validation.task:
        case Classification():
            return make_mistake_sections(folder, task, validation, batches), []
        case Language():
            loss_curve = compute_loss_by_position(task, batches)
            return make_text_samples(folder, task, validation, saved), loss_curve
        case Regression():
            return make_residual_sections(folder, task, validation, saved.dataset_info.targets or [], batches), []
        case Segmentation():
            return _make_pixel_sections(folder, task, batches), []
    deque(batches, maxlen=0)
    name = saved.recipe.task.name
    note = f"Only metrics are shown, because only the code of task {name} can interpret the outputs of its model."
    return [Paragraphs(folder, [note])], []


def _make_pixel_sections(run: str, task: Segmentation, batches: Iterable[EvaluatedBatch]) -> list[Section]:
    """Return the confusion sections of a segmentation model, counted in pixels."""
    counts = torch.zeros(len(task.classes), len(task.classes), dtype=torch.int64)
    for evaluated in batches:
        counts += task.sums(evaluated.outputs, evaluated.batch)["confusion"].cpu()
    truths, guesses = counts.nonzero(as_tuple=True)
    return make_confusion_sections(run, task.classes, truths, guesses, counts[truths, guesses], "pixels")


def _compare_with_log(saved: SavedModel, history: History, metrics: Mapping[str, float]) -> str:
    """Describe how the metrics differ from the values that the run logged after the same step.

    Returns an empty string if the run didn't log these metrics after this step.
    """
    suffix = "" if saved.weights == "model" else f"/{saved.weights}"
    pairs = [
        (value, point.value)
        for name, value in metrics.items()
        for point in history.curves.get(get_evaluation_curve_name(name) + suffix, [])
        if point.step == saved.step
    ]
    if not pairs:
        return ""
    if all(computed == logged or (math.isnan(computed) and math.isnan(logged)) for computed, logged in pairs):
        return "equal"
    return f"differs by {max(abs(computed - logged) for computed, logged in pairs):.1e}"


def _make_metrics_table(rows: Sequence[Mapping[str, str]]) -> Table:
    columns = [*dict.fromkeys(name for row in rows for name in row if name != _LOG_COLUMN), _LOG_COLUMN]
    return Table(
        "What the models do", columns, [[row.get(name, "") for name in columns] for row in rows], _METRICS_NOTE
    )
