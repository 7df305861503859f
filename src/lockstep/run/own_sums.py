"""Sums over batches and ranks in a loop of the user's own, and the task that stands for such a loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor

from lockstep.comm.named_sums import add_over_ranks
from lockstep.comm.world import World
from lockstep.common.own_code import refusal
from lockstep.core.batch import Batch, Inputs
from lockstep.tasks.base import LOSS, Monitor

_ONE: Final = ""  # the name of a value that has none


@dataclass
class Pass:
    """The batches that `run.each` gave this rank last, by their numbers; None for one that counts elsewhere."""

    batches: int = 0  # of all ranks
    numbers: list[int | None] = field(default_factory=list)


def sum_values(world: World, values: Any, last_pass: Callable[[], Pass]) -> Any:
    """Add values over their batches and all ranks; see `Run.sum`."""
    if isinstance(values, int | float | Tensor | Mapping) or not isinstance(values, Iterable):
        raise refusal(
            f"run.sum: it was given a {type(values).__name__}",
            "give one value for each batch of run.each: run.sum(f(batch) for batch in run.each(dataset))",
        )
    rows = [_by_name(value) for value in values]
    at = last_pass()
    if len(rows) != len(at.numbers):
        raise refusal(
            f"run.sum: {len(rows)} values, but run.each gave {len(at.numbers)} batches",
            "give one value for each batch: run.sum(f(batch) for batch in run.each(dataset))",
        )
    whole: dict[str, Tensor] = {}
    floats: dict[int, dict[str, Tensor]] = {}
    for number, row in zip(at.numbers, rows, strict=True):
        if number is None:
            continue
        floats[number] = {name: value.double() for name, value in row.items() if value.is_floating_point()}
        for name in row.keys() - floats[number].keys():
            whole[name] = whole[name] + row[name] if name in whole else row[name].long()
    sums = {name: _plain(each) for name, each in add_over_ranks(world, whole, floats, at.batches).items()}
    return sums.get(_ONE, sums)


def _by_name(value: Any) -> dict[str, Tensor]:
    values = value if isinstance(value, Mapping) else {_ONE: value}
    return {str(name): _tensor(each) for name, each in values.items()}


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, int | float | Tensor):
        raise refusal(f"run.sum: a value is a {type(value).__name__}", "give numbers, tensors, or dicts of them")
    return value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=_dtype(value))


def _dtype(value: float) -> torch.dtype:
    return torch.float64 if isinstance(value, float) else torch.int64


def _plain(value: Tensor) -> Any:
    return value if value.ndim else value.item()


@final
class NoTask:
    """The task of a model whose loop is the user's own: an engine asks it for nothing."""

    counts_samples: bool = True
    unit: str = "samples"
    fractions: Collection[str] = ()
    monitor: Monitor = LOSS

    def inputs(self, batch: Batch) -> Inputs:
        """See Task."""
        raise AssertionError("the loop calls the model itself")

    def weight(self, batch: Batch) -> int:
        """See Task."""
        raise AssertionError("the loop is asked for weights")

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """See Task."""
        raise AssertionError("the loop computes the loss itself")

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """See Task."""
        raise AssertionError("the loop adds by run.sum")

    def figures(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """See Task."""
        raise AssertionError("the loop has figures of its own")

    def details(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """See Task."""
        raise AssertionError("the loop adds by run.sum")

    def report(self, sums: Mapping[str, Tensor]) -> dict[str, Any]:
        """See Task."""
        raise AssertionError("the loop has figures of its own")

    def check(self, outputs: Any, batch: Batch) -> None:
        """See Task."""
        raise AssertionError("the loop is not known before it runs")
