"""Sections of a report about a regression model: predicted against true values, and the largest errors."""

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from lockstep.inference.validation_pass import EvaluatedBatch, Validation
from lockstep.reporting.charts import make_scatter_chart
from lockstep.reporting.page import Section, Table
from lockstep.tasks.regression import Regression, match_shapes

_MAX_CHARTS: Final = 4  # only the first targets have a chart
_MAX_DOTS: Final = 2_000  # maximum number of samples in each chart
_MAX_ROWS: Final = 10


def make_residual_sections(
    run: str, task: Regression, validation: Validation, targets: Sequence[str], batches: Iterable[EvaluatedBatch]
) -> list[Section]:
    """Return a scatter chart of predicted against true values for each target, and a table of the largest errors.

    `targets` contains the names of the targets, or is empty if the targets have no names.
    """
    pairs = [match_shapes(task.model_name, batch.outputs, batch.batch, at_least_2d=True) for batch in batches]
    predicted, true = (
        torch.cat([tensor.double().cpu().flatten(1) for tensor in side]) for side in zip(*pairs, strict=True)
    )
    count = true.shape[1]
    unnamed = [""] if count == 1 else [f"number {number}" for number in range(count)]
    names = targets if len(targets) == count else unnamed
    indices = torch.linspace(0, len(true) - 1, min(_MAX_DOTS, len(true))).long()
    notes = [f"{len(indices):,} of {len(true):,} samples, evenly spaced."] if len(indices) < len(true) else []
    notes += [f"The first {_MAX_CHARTS} of {count} numbers."] if count > _MAX_CHARTS else []
    charts = [
        make_scatter_chart(
            f"{run}: predicted {name}".rstrip(),
            "true",
            "predicted",
            list(zip(true[indices, number].tolist(), predicted[indices, number].tolist(), strict=True)),
            note=" ".join(notes),
        )
        for number, name in enumerate(names[:_MAX_CHARTS])
    ]
    return [*charts, _make_error_table(run, validation, names, true, predicted)]


def _make_error_table(
    run_name: str, validation: Validation, target_names: Sequence[str], true_values: Tensor, predicted_values: Tensor
) -> Table:
    errors = (predicted_values - true_values).abs().nan_to_num(torch.inf)
    largest, target_indices = errors.max(1)
    order = largest.argsort(descending=True, stable=True)[:_MAX_ROWS].tolist()
    several_targets = len(target_names) > 1
    rows = [
        [
            validation.get_sample_name(int(validation.sample_indices[row])),
            *([target_names[int(target_indices[row])]] if several_targets else []),
            *(f"{float(values[row, target_indices[row]]):.6g}" for values in (true_values, predicted_values)),
        ]
        for row in order
    ]
    return Table(
        f"{run_name}: largest errors", ["sample", *(["target"] if several_targets else []), "true", "predicted"], rows
    )
