"""Confusion matrix of a classifier, or a table of the most frequent mistakes if there are too many classes."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lockstep.reporting import wording
from lockstep.reporting.charts import matrix
from lockstep.reporting.page import Section, Table, Words

_MOST_CELLS: Final = 20  # classes of a matrix that is still readable
_MOST_ROWS: Final = 20  # of a table

_NOTE: Final = "Blue cells are correct, and orange cells are mistakes. Darker cells have a larger share of their row."


def confusions(
    run: str, names: Sequence[str], truths: Tensor, guesses: Tensor, times: Tensor, unit: str
) -> list[Section]:
    """Return a matrix or a table of class pairs, and a table of the classes.

    `truths`, `guesses` and `times` are int64 of shape [rows]. In each row, the class in `guesses` was predicted that
    many `times` for the class in `truths`. `unit` is the counted noun in the plural, such as `samples` or `pixels`.
    """
    of, taken, right = (torch.zeros(len(names), dtype=torch.int64) for _ in range(3))
    of.index_add_(0, truths, times)
    taken.index_add_(0, guesses, times)
    right.index_add_(0, truths, torch.where(truths == guesses, times, 0))
    shown: Section
    if len(names) <= _MOST_CELLS:
        counts = torch.zeros(len(names), len(names), dtype=torch.int64)
        counts.index_put_((truths, guesses), times, accumulate=True)
        shown = matrix(f"{run}: {unit} by class", "predicted", "true", names, counts.tolist(), note=_NOTE)
    else:
        shown = _pairs(run, names, truths, guesses, times, of, unit)
    return [shown, _classes(run, names, of.tolist(), taken.tolist(), right.tolist(), unit)]


def _pairs(
    run: str, names: Sequence[str], truths: Tensor, guesses: Tensor, times: Tensor, of: Tensor, unit: str
) -> Section:
    title = f"{run}: most frequent mistakes"
    wrong = truths != guesses
    keys, where = np.unique((truths * len(names) + guesses)[wrong].numpy(), return_inverse=True)
    counts = torch.zeros(len(keys), dtype=torch.int64).index_add_(0, torch.from_numpy(where), times[wrong])
    rows = []
    for row in counts.argsort(descending=True, stable=True)[:_MOST_ROWS].tolist():
        one, other = divmod(int(keys[row]), len(names))
        count = int(counts[row])
        rows.append([names[one], names[other], f"{count:,}", wording.percent(count / int(of[one]))])
    if not rows:
        return Words(title, ["There are no mistakes."])
    note = f"{len(names):,} classes are too many for a matrix. These are the most frequent of {len(keys):,} pairs."
    return Table(title, ["true", "predicted", unit, "share of the class"], rows, note)


def _classes(
    run: str, names: Sequence[str], of: Sequence[int], taken: Sequence[int], right: Sequence[int], unit: str
) -> Table:
    """Return a table with the recall and precision of the classes, lowest recall first."""
    there = [number for number in range(len(names)) if of[number] or taken[number]]
    order = sorted(there, key=lambda number: right[number] / of[number] if of[number] else 2.0)[:_MOST_ROWS]
    rows = [
        [names[number], f"{of[number]:,}", _share(right[number], of[number]), _share(right[number], taken[number])]
        for number in order
    ]
    some = f" The {len(rows)} with the lowest recall of {len(there):,}." if len(rows) < len(there) else ""
    note = (
        f"Recall: the share of a class that is found. Precision: the share of its predictions that are correct.{some}"
    )
    return Table(f"{run}: classes", ["class", unit, "recall", "precision"], rows, note)


def _share(part: int, of: int) -> str:
    return wording.percent(part / of) if of else ""
