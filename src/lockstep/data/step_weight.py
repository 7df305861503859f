"""Computes the total weight of a step across all ranks, for batches that aren't weighted by their number of samples.

A batch has a single weight, or a weight for each of several named losses. A rank learns the names from its first batch,
so ranks without a micro-batch don't know them yet. In each step, the ranks therefore all-reduce a single weight,
together with a flag that is set if any rank has named weights. Once the flag is set, the ranks gather the names, and
then all-reduce a weight for each name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from lockstep.core.batch import Batch
from lockstep.core.order import Step
from lockstep.core.several_losses import Weight, describe_names, get_loss_names
from lockstep.errors import UsageError

_SINGLE: Final = "a single integer"
_NO_NAMES: Final = "-"  # sent instead of names if the batches have a single weight


@final
@dataclass(eq=False)
class BatchWeighting:
    """Computes the weights of batches and steps, for tasks that don't weight batches by their number of samples.

    - `compute_batch_weight`: Returns the weight of a batch, or a weight for each of several named losses, sorted by
      name.
    - `all_reduce`: All-reduces integers across the ranks.
    - `all_gather_text`: Gathers a string from every rank, in rank order.
    - `name`: The name of the weight function for error messages.
    """

    compute_batch_weight: Callable[[Batch], Weight]
    all_reduce: Callable[[Sequence[int]], list[int]]
    all_gather_text: Callable[[str], list[str]]
    name: str = "weight"
    _first_names: list[tuple[str, ...] | None] = field(default_factory=list)  # names in the first batch of this rank
    _agreed_names: tuple[str, ...] | None = None  # names on all ranks, once they have been gathered

    def compute_weight(self, batch: Batch) -> Weight:
        """Return the weight of a batch. Raises UsageError if the loss names differ from those of the first batch."""
        weight = self.compute_batch_weight(batch)
        names = get_loss_names(weight)
        if not self._first_names:
            self._first_names.append(names)
        if names != self._first_names[0]:
            raise UsageError(
                f"{self.name}: returned {describe_names(names, _SINGLE)} for a batch, but "
                f"{describe_names(self._first_names[0], _SINGLE)} for the first one; return the same names for each "
                "batch, with weight 0 for a loss without items"
            )
        return weight

    def add_total_weight(self, step: Step, weights: Sequence[Weight]) -> Step:
        """Return the step with its total weight across all ranks. All ranks must call this method.

        `weights` contains the weights of the micro-batches that this rank counts. Raises UsageError if the ranks have
        different loss names.
        """
        if self._agreed_names is None:
            has_names = bool(self._first_names) and self._first_names[0] is not None
            single = 0 if has_names else sum(weight for weight in weights if isinstance(weight, int))
            total, named_ranks = self.all_reduce([single, has_names])
            if not named_ranks:
                return step._replace(total_weight=total)
            self._agreed_names = self._gather_names()
        rows = [[weight[name] for name in self._agreed_names] for weight in weights if isinstance(weight, Mapping)]
        totals = self.all_reduce([sum(column) for column in zip(*rows, strict=True)] or [0] * len(self._agreed_names))
        by_name = dict(zip(self._agreed_names, totals, strict=True))
        return step._replace(total_weight=sum(totals), weights=by_name)

    def _gather_names(self) -> tuple[str, ...]:
        """Gather the loss names, which must be the same on all ranks. All ranks must call this method."""
        own_text = (
            ""
            if not self._first_names
            else _NO_NAMES
            if self._first_names[0] is None
            else ",".join(self._first_names[0])
        )
        names = {
            rank: None if text == _NO_NAMES else tuple(text.split(","))
            for rank, text in enumerate(self.all_gather_text(own_text))
            if text  # empty for ranks that haven't had a batch yet
        }
        first_rank = min(names)
        for rank, rank_names in names.items():
            if rank_names != names[first_rank]:
                raise UsageError(
                    f"{self.name}: rank {rank} returned {describe_names(rank_names, _SINGLE)}, but rank {first_rank} "
                    f"returned {describe_names(names[first_rank], _SINGLE)}; return the same names on all ranks"
                )
        agreed = names[first_rank]
        assert agreed is not None
        return agreed
