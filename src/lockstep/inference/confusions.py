"""Sections of a report about a classifier: its confusion matrix or most frequent mistakes, recall and precision."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lockstep.reporting import wording
from lockstep.reporting.charts import make_matrix_chart
from lockstep.reporting.page import Paragraphs, Section, Table

_MAX_MATRIX_CLASSES: Final = 20  # a matrix with more classes would be unreadable
_MAX_ROWS: Final = 20  # maximum number of rows in each table

_NOTE: Final = "Blue cells are correct, and orange cells are mistakes. Darker cells have a larger share of their row."


def make_confusion_sections(
    run: str, names: Sequence[str], targets: Tensor, predicted: Tensor, occurrences: Tensor, unit: str
) -> list[Section]:
    """Return a confusion matrix, and a table with the recall and precision of each class.

    If there are more than 20 classes, a table of the most frequent mistakes replaces the matrix. `targets`, `predicted`
    and `occurrences` are int64 tensors of shape [pairs]: the true class, the predicted class, and how often this pair
    of classes occurred. `unit` is the counted noun in the plural, such as `samples` or `pixels`.
    """
    class_counts, predicted_counts, correct_counts = (torch.zeros(len(names), dtype=torch.int64) for _ in range(3))
    class_counts.index_add_(0, targets, occurrences)
    predicted_counts.index_add_(0, predicted, occurrences)
    correct_counts.index_add_(0, targets, torch.where(targets == predicted, occurrences, 0))
    section: Section
    if len(names) <= _MAX_MATRIX_CLASSES:
        counts = torch.zeros(len(names), len(names), dtype=torch.int64)
        counts.index_put_((targets, predicted), occurrences, accumulate=True)
        section = make_matrix_chart(f"{run}: {unit} by class", "predicted", "true", names, counts.tolist(), note=_NOTE)
    else:
        section = _make_mistake_table(run, names, targets, predicted, occurrences, class_counts, unit)
    return [
        section,
        _make_class_table(run, names, class_counts.tolist(), predicted_counts.tolist(), correct_counts.tolist(), unit),
    ]


def _make_mistake_table(
    run_name: str,
    class_names: Sequence[str],
    targets: Tensor,
    predicted: Tensor,
    occurrences: Tensor,
    class_counts: Tensor,
    unit: str,
) -> Section:
    title = f"{run_name}: most frequent mistakes"
    is_mistake = targets != predicted
    keys, inverse = np.unique((targets * len(class_names) + predicted)[is_mistake].numpy(), return_inverse=True)
    counts = torch.zeros(len(keys), dtype=torch.int64).index_add_(0, torch.from_numpy(inverse), occurrences[is_mistake])
    rows = []
    for row in counts.argsort(descending=True, stable=True)[:_MAX_ROWS].tolist():
        truth, guess = divmod(int(keys[row]), len(class_names))
        count = int(counts[row])
        rows.append(
            [
                class_names[truth],
                class_names[guess],
                f"{count:,}",
                wording.format_percentage(count / int(class_counts[truth])),
            ]
        )
    if not rows:
        return Paragraphs(title, ["There are no mistakes."])
    note = (
        f"{len(class_names):,} classes are too many for a matrix. These are the most frequent of {len(keys):,} pairs."
    )
    return Table(title, ["true", "predicted", unit, "share of the class"], rows, note)


def _make_class_table(
    run: str,
    names: Sequence[str],
    class_counts: Sequence[int],
    predicted_counts: Sequence[int],
    correct_counts: Sequence[int],
    unit: str,
) -> Table:
    """Return a table of the recall and precision of each class, with the lowest recall first."""
    classes = [number for number in range(len(names)) if class_counts[number] or predicted_counts[number]]
    order = sorted(
        classes, key=lambda number: correct_counts[number] / class_counts[number] if class_counts[number] else 2.0
    )[:_MAX_ROWS]
    rows = [
        [
            names[number],
            f"{class_counts[number]:,}",
            _format_share(correct_counts[number], class_counts[number]),
            _format_share(correct_counts[number], predicted_counts[number]),
        ]
        for number in order
    ]
    predicted = [name for name, count in zip(names, predicted_counts, strict=True) if count]
    is_collapsed = len(predicted) == 1 and sum(count > 0 for count in class_counts) > 1
    collapse = (
        f"The model predicts {predicted[0]} for all {unit}: check that the targets belong to the inputs, and try a "
        "lower learning rate. "
        if is_collapsed
        else ""
    )
    selection = (
        f" These are the {len(rows)} of {len(classes):,} classes with the lowest recall."
        if len(rows) < len(classes)
        else ""
    )
    note = (
        f"{collapse}Recall: the share of a class that is found. Precision: the share of its predictions that are "
        f"correct.{selection}"
    )
    return Table(f"{run}: classes", ["class", unit, "recall", "precision"], rows, note)


def _format_share(count: int, total: int) -> str:
    return wording.format_percentage(count / total) if total else ""
