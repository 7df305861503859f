"""Shows on a page what saved runs have learned.

Each run is evaluated in this process. Its task decides which examples the page shows.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from lockstep.comm.named_sums import NamedSums
from lockstep.errors import LockstepError, UsageError
from lockstep.inference.confusions import confusions
from lockstep.inference.mistakes import mistakes
from lockstep.inference.perplexity import loss_by_position, samples_of_text
from lockstep.inference.residuals import residuals
from lockstep.inference.saved import SavedModel
from lockstep.inference.validation_pass import EvaluatedBatch, Validation, open_validation
from lockstep.reporting import wording
from lockstep.reporting.charts import RUNS, lines
from lockstep.reporting.page import Section, Table, Words
from lockstep.reporting.run_log import History, evaluation_curve
from lockstep.reporting.run_view import RunView
from lockstep.tasks.classification import Classification
from lockstep.tasks.language import Language
from lockstep.tasks.regression import Regression
from lockstep.tasks.segmentation import Segmentation

_RECORDED: Final = "compared with the log"
_FIGURES: Final = (
    "Each checkpoint was evaluated by one process. Where all samples were looked at, the last column compares the "
    "figures with those that the run logged after the same step; where only some were, they lie at equal distances."
)
_BY_POSITION: Final = "The mean loss of the validation tokens that have so many others before them."


Line = Sequence[tuple[float, float]]


class Inspection(NamedTuple):
    """The sections of a page, and a reason for each run that could not be evaluated."""

    sections: list[Section]
    problems: list[str]


class _One(NamedTuple):
    """The results of one run: a row of the table of figures, the sections, and the loss by position."""

    row: Mapping[str, str]
    sections: list[Section]
    line: Line


def inspect_runs(
    found: Sequence[RunView], samples: int, opened: Callable[[str], SavedModel], tell: Callable[[str], None]
) -> Inspection:
    """Evaluate the checkpoint of each run on at most `samples` validation samples, and return the sections.

    `opened` opens the checkpoint of a run folder. `tell` is called with lines about each run. Nothing is downloaded.
    Raises UsageError if no run can be evaluated. If only some runs can't, the sections give the reason in a sentence.
    """
    done: dict[str, _One] = {}
    problems: dict[str, str] = {}
    for each in found:
        folder = each.folder
        try:
            done[folder] = _inspect(opened(folder), folder, each.history, samples, tell)
        except LockstepError as error:
            problems[folder] = str(error)
    if not done:
        raise UsageError("\n".join(f"--examples: {reason}" for reason in problems.values()))
    sections: list[Section] = [_figures([each.row for each in done.values()])]
    if problems:
        sections.append(Words("", [f"Nothing of {folder}: {reason}" for folder, reason in problems.items()]))
    if by_position := {folder: each.line for folder, each in done.items() if each.line}:
        x, y = "tokens before it in the context", "loss"
        names = [each.folder for each in found]  # of all runs, for the colors of the other charts
        sections.append(
            lines(
                "Loss by position",
                x,
                y,
                by_position,
                names=names,
                legend=RUNS,
                note=_BY_POSITION,
                from_zero=False,
            )
        )
    of_runs = [(folder, section) for folder, each in done.items() for section in each.sections]
    if len(found) == 1:  # the heading of the page is its name
        of_runs = [(run, replace(section, title=section.title.removeprefix(f"{run}: "))) for run, section in of_runs]
    sections += [section for _, section in of_runs]
    return Inspection(sections, [*problems.values()])


def _inspect(saved: SavedModel, folder: str, history: History, samples: int, tell: Callable[[str], None]) -> _One:
    for line in saved.remarks:
        tell(line)
    validation = open_validation(saved, samples)
    task, count, of = validation.task, len(validation.numbers), len(validation.split)
    tell(f"{saved.words}: evaluating {count:,} of {of:,} validation samples on {validation.computing.device}")
    added = NamedSums()
    sections, by_position = _view(folder, saved, validation, validation.batches(added))
    figures = validation.figures(added)
    row = {
        "run": folder,
        "after step": f"{saved.step:,}",
        "weights": saved.weights,
        "samples": f"{count:,} of {of:,}",
        **{name: wording.figure(value, name in task.fractions) for name, value in figures.items()},
        _RECORDED: _deviation_from_log(saved, history, figures) if count == of else "",
    }
    return _One(row, sections, by_position)


def _view(
    folder: str, saved: SavedModel, validation: Validation, batches: Iterator[EvaluatedBatch]
) -> tuple[list[Section], Line]:
    """Return the sections that the task of a run supports, and the loss by position for language models.

    All batches are consumed.
    """
    match task := validation.task:
        case Classification():
            return mistakes(folder, task, validation, batches), []
        case Language():
            line = loss_by_position(task, batches)
            return samples_of_text(folder, task, validation, saved), line
        case Regression():
            return residuals(folder, task, validation, saved.facts.targets or [], batches), []
        case Segmentation():
            return _pixels(folder, task, batches), []
    deque(batches, maxlen=0)
    name = saved.recipe.task.name
    note = f"Nothing but its figures: what task {name} makes of a model's outputs is known to its code alone."
    return [Words(folder, [note])], []


def _pixels(run: str, task: Segmentation, batches: Iterable[EvaluatedBatch]) -> list[Section]:
    """Return the confusion matrix over pixels."""
    counts = torch.zeros(len(task.classes), len(task.classes), dtype=torch.int64)
    for evaluated in batches:
        counts += task.sums(evaluated.outputs, evaluated.batch)["confusion"].cpu()
    truths, guesses = counts.nonzero(as_tuple=True)
    return confusions(run, task.classes, truths, guesses, counts[truths, guesses], "pixels")


def _deviation_from_log(saved: SavedModel, history: History, figures: Mapping[str, float]) -> str:
    """Return the deviation of the figures from those that the run logged after the same step.

    Returns an empty string if the run logged none of them.
    """
    suffix = "" if saved.weights == "model" else f"/{saved.weights}"
    pairs = [
        (value, point.value)
        for name, value in figures.items()
        for point in history.curves.get(evaluation_curve(name) + suffix, [])
        if point.step == saved.step
    ]
    if not pairs:
        return ""
    if all(one == other or (math.isnan(one) and math.isnan(other)) for one, other in pairs):
        return "equal"
    return f"differs by {max(abs(one - other) for one, other in pairs):.1e}"


def _figures(rows: Sequence[Mapping[str, str]]) -> Table:
    columns = [*dict.fromkeys(name for row in rows for name in row if name != _RECORDED), _RECORDED]
    return Table("What the models do", columns, [[row.get(name, "") for name in columns] for row in rows], _FIGURES)
