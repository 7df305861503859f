"""The confusion matrix of a classifier, or a table of its most frequent mistakes if there are too many classes."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lockstep.reporting import wording
from lockstep.reporting.charts import make_matrix_chart
from lockstep.reporting.page import Section, Table, Words

_MAX_MATRIX_CLASSES: Final = 20  # maximum number of classes in a readable matrix
_MAX_ROWS: Final = 20  # maximum number of rows in a table

_NOTE: Final = "Blue cells are correct, and orange cells are mistakes. Darker cells have a larger share of their row."


def confusions(
    run: str, names: Sequence[str], truths: Tensor, guesses: Tensor, times: Tensor, unit: str
) -> list[Section]:
    """Return a matrix or a table of class pairs, and a table of the classes.

    `truths`, `guesses` and `times` are int64 tensors of shape [rows]. Each row says that the class in `guesses` was
    predicted `times` times for samples of the class in `truths`. `unit` is the counted noun in the plural, such as
    `samples` or `pixels`.
    """
    class_counts, predicted_counts, correct_counts = (torch.zeros(len(names), dtype=torch.int64) for _ in range(3))
    class_counts.index_add_(0, truths, times)
    predicted_counts.index_add_(0, guesses, times)
    correct_counts.index_add_(0, truths, torch.where(truths == guesses, times, 0))
    section: Section
    if len(names) <= _MAX_MATRIX_CLASSES:
        counts = torch.zeros(len(names), len(names), dtype=torch.int64)
        counts.index_put_((truths, guesses), times, accumulate=True)
        section = make_matrix_chart(f"{run}: {unit} by class", "predicted", "true", names, counts.tolist(), note=_NOTE)
    else:
        section = _pairs(run, names, truths, guesses, times, class_counts, unit)
    return [
        section,
        _classes(run, names, class_counts.tolist(), predicted_counts.tolist(), correct_counts.tolist(), unit),
    ]


def _pairs(
    run: str, names: Sequence[str], truths: Tensor, guesses: Tensor, times: Tensor, class_counts: Tensor, unit: str
) -> Section:
    title = f"{run}: most frequent mistakes"
    is_mistake = truths != guesses
    keys, inverse = np.unique((truths * len(names) + guesses)[is_mistake].numpy(), return_inverse=True)
    counts = torch.zeros(len(keys), dtype=torch.int64).index_add_(0, torch.from_numpy(inverse), times[is_mistake])
    rows = []
    for row in counts.argsort(descending=True, stable=True)[:_MAX_ROWS].tolist():
        truth, guess = divmod(int(keys[row]), len(names))
        count = int(counts[row])
        rows.append(
            [names[truth], names[guess], f"{count:,}", wording.format_percentage(count / int(class_counts[truth]))]
        )
    if not rows:
        return Words(title, ["There are no mistakes."])
    note = f"{len(names):,} classes are too many for a matrix. These are the most frequent of {len(keys):,} pairs."
    return Table(title, ["true", "predicted", unit, "share of the class"], rows, note)


def _classes(
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
            _share(correct_counts[number], class_counts[number]),
            _share(correct_counts[number], predicted_counts[number]),
        ]
        for number in order
    ]
    selection = f" The {len(rows)} with the lowest recall of {len(classes):,}." if len(rows) < len(classes) else ""
    note = (
        f"Recall: the share of a class that is found. Precision: the share of its predictions that are "
        f"correct.{selection}"
    )
    return Table(f"{run}: classes", ["class", unit, "recall", "precision"], rows, note)


def _share(part: int, total: int) -> str:
    return wording.format_percentage(part / total) if total else ""
