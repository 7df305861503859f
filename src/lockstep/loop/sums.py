"""Implements `run.sum`, which adds up values over evaluation batches and ranks."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from lockstep.comm.named_sums import NamedSums
from lockstep.comm.world import World
from lockstep.common.user_code import make_refusal

_UNNAMED: Final = ""  # the name of an unnamed value


@dataclass
class EvaluationPass:
    """The state of an evaluation pass, which is one iteration over `run.each`.

    `batch_numbers` contains the number of each batch of this rank, or None for a batch that a different rank counts.
    """

    num_batches: int = 0  # the number of batches on all ranks
    batch_numbers: list[int | None] = field(default_factory=list)
    is_complete: bool = False  # whether the loop ran through all batches of this rank
    is_summed: bool = False  # whether the script called `run.sum` for this pass

    @property
    def is_local(self) -> bool:
        """Whether the pass is complete, but each rank only has the results of its own batches."""
        return self.is_complete and bool(self.batch_numbers) and not self.is_summed


def sum_values(world: World, values: Any, get_last_pass: Callable[[], EvaluationPass]) -> Any:
    """Sum values over the batches of the last pass and over all ranks. See `Run.sum`."""
    if isinstance(values, int | float | Tensor | Mapping) or not isinstance(values, Iterable):
        raise make_refusal(
            f"run.sum: expected an iterable of values, got a {type(values).__name__}",
            "pass one value for each batch of run.each: run.sum(f(batch) for batch in run.each(dataset))",
        )
    named_values = [_to_named_tensors(value) for value in values]
    current_pass = get_last_pass()
    if len(named_values) != len(current_pass.batch_numbers):
        raise make_refusal(
            f"run.sum: got {len(named_values)} values for {len(current_pass.batch_numbers)} batches of run.each",
            "pass one value for each batch: run.sum(f(batch) for batch in run.each(dataset))",
        )
    current_pass.is_summed, sums_by_batch = True, NamedSums()
    for number, tensors in zip(current_pass.batch_numbers, named_values, strict=True):
        if number is not None:
            sums_by_batch.add(number, tensors)
    sums = {
        name: total if total.ndim else total.item()
        for name, total in sums_by_batch.compute_total(world, current_pass.num_batches).items()
    }
    if _UNNAMED in sums and len(sums) > 1:
        raise make_refusal(
            "run.sum: got dicts for some batches, and values without a name for others",
            "pass a dict for each batch; a name that a batch does not have counts as 0",
        )
    return sums.get(_UNNAMED, sums)


def _to_named_tensors(value: Any) -> dict[str, Tensor]:
    values = value if isinstance(value, Mapping) else {_UNNAMED: value}
    return {str(name): _to_tensor(part) for name, part in values.items()}


def _to_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, int | float):
        raise make_refusal(
            f"run.sum: got a value of type {type(value).__name__}", "pass numbers, tensors, or dicts of them"
        )
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
