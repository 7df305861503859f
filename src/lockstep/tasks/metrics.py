"""Metrics of the user's own, by import path: functions of outputs and batch that return sums, read over the weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from lockstep.common.importing import import_object
from lockstep.common.own_code import OwnCode
from lockstep.common.reserved_metrics import OF_TRAINING, first_taken
from lockstep.core.batch import Batch, length, map_tensors
from lockstep.errors import UsageError
from lockstep.tasks.base import Figures

Metric = Callable[[Any, Batch], Mapping[str, Any]]
Metrics = Mapping[str, Metric]  # by their import paths

_CONTRACT: Final = "see docs/bring-your-own.md"


def find_metrics(paths: Sequence[str]) -> dict[str, Metric]:
    """Return the metrics of these import paths; UsageError where one is not there or no function."""
    metrics = {path: import_object(path, "metric") for path in paths}
    for path, metric in metrics.items():
        if not callable(metric):
            raise UsageError(f"metric {path}: it is of type {type(metric).__name__}; name a function ({_CONTRACT})")
    return metrics


def metric_sums(metrics: Metrics, outputs: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the sums of all metrics, each behind its path: `my.metrics:absolute/error`."""
    return {
        f"{path}/{name}": value
        for path, metric in metrics.items()
        for name, value in _sums(path, metric, outputs, batch).items()
    }


def metric_figures(metrics: Metrics, sums: Mapping[str, Tensor], figures: Figures) -> Figures:
    """Return each sum of a metric over the weight; UsageError where `figures` has one of that name."""
    weight = max(int(sums.get("weight", 1)), 1)
    found: Figures = {}
    for key, value in sums.items():
        path, _, name = key.rpartition("/")
        if path not in metrics:
            continue
        if name in figures or name in found or name == "loss":
            raise UsageError(f"metric {path}: there is a figure {name} already; give it another name ({_CONTRACT})")
        found[name] = float(value) / weight
    return found


def check_metrics(metrics: Metrics, outputs: Any, batch: Batch) -> None:
    """Raise UsageError unless each metric gives sums: of two samples together what they add up to one by one.

    Outputs on the meta device stand for some numbers of their shape. With a mean the size of a batch would decide the
    weight of its samples.
    """
    if length(batch) < 2:
        return
    outputs = map_tensors(_with_values, outputs)
    both, one, other = (
        metric_sums(metrics, *(map_tensors(partial(_rows, rows), each) for each in (outputs, batch)))
        for rows in (slice(0, 2), slice(0, 1), slice(1, 2))
    )
    nothing = torch.tensor(torch.nan)
    for key, value in both.items():
        separate = one.get(key, nothing).double() + other.get(key, nothing).double()
        if not torch.allclose(value.double(), separate, rtol=1e-3, atol=1e-5, equal_nan=True):
            path, _, name = key.rpartition("/")
            raise UsageError(
                f"metric {path}: {name} of two samples is {float(value):.6g}, and one by one they add up to "
                f"{float(separate):.6g}; return a sum over the samples, not a mean ({_CONTRACT})"
            )


def _with_values(tensor: Tensor) -> Tensor:
    if tensor.device.type != "meta":
        return tensor
    return torch.linspace(-1.0, 1.0, tensor.numel()).reshape(tensor.shape).to(tensor.dtype)


def _rows(rows: slice, tensor: Tensor) -> Tensor:
    return tensor[rows]


def _sums(path: str, metric: Metric, outputs: Any, batch: Batch) -> dict[str, Tensor]:
    with OwnCode(f"metric {path}"):
        found = metric(outputs, batch)
        if not isinstance(found, Mapping):
            raise UsageError(f"metric {path}: it returned {type(found).__name__}; return a mapping of names to sums")
        sums = {
            str(name): torch.as_tensor(value).detach() for name, value in found.items()
        }  # to be read, not learned from
    if (taken := first_taken(sums, OF_TRAINING)) is not None:
        raise UsageError(
            f"metric {path}: {taken} is what each evaluation is written with already; give it another name "
            f"({_CONTRACT})"
        )
    for name, value in sums.items():
        if value.ndim or value.is_complex() or "/" in name:
            raise UsageError(f"metric {path}: {name} has shape {tuple(value.shape)}; return 0-dim sums by plain names")
    return sums
