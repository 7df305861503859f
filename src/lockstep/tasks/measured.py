"""A task with metrics of the user's own: what they add is added beside the task's sums, and read beside its figures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor

from lockstep.common.importing import import_object
from lockstep.common.own_code import OwnCode
from lockstep.common.reserved import OF_TRAINING, first_taken
from lockstep.core.batch import Batch, Inputs, length, mapped
from lockstep.errors import UsageError
from lockstep.tasks.base import Figures, Monitor, Report, Task

Metric = Callable[[Any, Batch], Mapping[str, Any]]

_CONTRACT: Final = "see docs/bring-your-own.md"


@final
@dataclass(frozen=True)
class Measured:
    """`task`, and metrics by import path: functions `(outputs, batch)` of sums, which are divided by the weight."""

    task: Task
    metrics: Mapping[str, Metric]

    @property
    def counts_samples(self) -> bool:
        """See Task."""
        return self.task.counts_samples

    @property
    def unit(self) -> str:
        """See Task."""
        return self.task.unit

    @property
    def fractions(self) -> Collection[str]:
        """See Task."""
        return self.task.fractions

    @property
    def monitor(self) -> Monitor:
        """See Task."""
        return self.task.monitor

    def inputs(self, batch: Batch) -> Inputs:
        """See Task."""
        return self.task.inputs(batch)

    def weight(self, batch: Batch) -> int:
        """See Task."""
        return self.task.weight(batch)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """See Task."""
        return self.task.loss(outputs, batch)

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the task's sums, and each metric's under its path."""
        own = {
            f"{path}/{name}": value
            for path, metric in self.metrics.items()
            for name, value in _summed(path, metric, outputs, batch).items()
        }
        return {**self.task.sums(outputs, batch), **own}

    def figures(self, sums: Mapping[str, Tensor]) -> Figures:
        """Return the task's figures, and each sum of a metric over the weight; UsageError where two have one name."""
        figures = self.task.figures(sums)
        weight = max(int(sums["weight"]), 1)
        for key, value in sums.items():
            path, _, name = key.rpartition("/")
            if path not in self.metrics:
                continue
            if name in figures or name == "loss":
                raise UsageError(f"metric {path}: there is a figure {name} already; give it another name ({_CONTRACT})")
            figures[name] = float(value) / weight
        return figures

    def details(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """See Task."""
        return self.task.details(outputs, batch)

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        """See Task."""
        return self.task.report(sums)

    def check(self, outputs: Any, batch: Batch) -> None:
        """See Task; a metric is tried on the first two samples."""
        self.task.check(outputs, batch)
        if length(batch) > 1:
            two = (mapped(lambda tensor: tensor[:2], each) for each in (outputs, batch))
            check_metrics([*self.metrics], *two)


def measured(task: Task, paths: Sequence[str]) -> Task:
    """Return the task with the metrics of these import paths; UsageError where one is not there or no function."""
    metrics = {path: import_object(path, "metric") for path in paths}
    for path, metric in metrics.items():
        if not callable(metric):
            raise UsageError(f"metric {path}: it is of type {type(metric).__name__}; name a function ({_CONTRACT})")
    return Measured(task, metrics) if metrics else task


def check_metrics(paths: Sequence[str], outputs: Any, batch: Batch) -> None:
    """Raise UsageError unless each metric gives sums: of two samples together what they add up to one by one.

    `outputs` and `batch` are of two samples; outputs on the meta device stand for some numbers of their shape. With a
    mean the size of a batch would decide the weight of its samples.
    """
    outputs = mapped(_with_values, outputs)
    for path in paths:
        metric: Metric = import_object(path, "metric")
        both = _summed(path, metric, outputs, batch)
        rows = [partial(_row, number) for number in range(2)]
        one, other = (_summed(path, metric, mapped(row, outputs), mapped(row, batch)) for row in rows)
        for name, value in both.items():
            apart = one.get(name, torch.tensor(torch.nan)).double() + other.get(name, torch.tensor(torch.nan)).double()
            if not torch.allclose(value.double(), apart, rtol=1e-3, atol=1e-5, equal_nan=True):
                raise UsageError(
                    f"metric {path}: {name} of two samples is {float(value):.6g}, and one by one they add up to "
                    f"{float(apart):.6g}; return a sum over the samples, not a mean ({_CONTRACT})"
                )


def _with_values(tensor: Tensor) -> Tensor:
    if tensor.device.type != "meta":
        return tensor
    return torch.linspace(-1.0, 1.0, tensor.numel()).reshape(tensor.shape).to(tensor.dtype)


def _row(number: int, tensor: Tensor) -> Tensor:
    return tensor[number : number + 1]


def _summed(path: str, metric: Metric, outputs: Any, batch: Batch) -> dict[str, Tensor]:
    with OwnCode(f"metric {path}"):
        found = metric(outputs, batch)
        if not isinstance(found, Mapping):
            raise UsageError(f"metric {path}: it returned {type(found).__name__}; return a mapping of names to sums")
        sums = {str(name): torch.as_tensor(value) for name, value in found.items()}
    if (taken := first_taken(sums, OF_TRAINING)) is not None:
        raise UsageError(
            f"metric {path}: {taken} is what each evaluation is written with already; give it another name "
            f"({_CONTRACT})"
        )
    for name, value in sums.items():
        if value.ndim or value.is_complex() or "/" in name:
            raise UsageError(f"metric {path}: {name} has shape {tuple(value.shape)}; return 0-dim sums by plain names")
    return sums
