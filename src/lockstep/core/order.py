"""Which samples a step takes and how they are cut: functions of (seed, epoch, step) alone.

Because nothing here is drawn from a stream with a position, resuming at any step on any number of
processes needs no sampler state.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


def cut(length: int, parts: int) -> list[range]:
    """Cut range(length) into `parts` contiguous ranges whose sizes differ by at most one, longer ones first.

    With fewer elements than parts the last ranges are empty.
    """
    return [part(length, parts, number) for number in range(parts)]


def part(length: int, parts: int, number: int) -> range:
    """Return range `number` of `cut(length, parts)`."""
    size, longer = divmod(length, parts)
    first = number * size + min(number, longer)
    return range(first, first + size + (number < longer))


class Step(NamedTuple):
    """One update: what it takes from the epoch's order, and what has gone before it."""

    number: int  # of the run, from 0
    epoch: int  # from 0
    first: int  # position in the epoch's order
    samples: int
    samples_seen: int  # before this step, in the whole run
    last_of_epoch: bool
    counted: int | None = None  # what its samples weigh, where that is not their number

    @property
    def weight(self) -> int:
        """What the sum of the losses is divided by."""
        return self.samples if self.counted is None else self.counted

    def microbatches(self, count: int) -> list[range]:
        """Cut the step into its micro-batches, as positions in the epoch's order; none is empty.

        A step with fewer samples than `count` has only as many micro-batches as samples: the others would add
        nothing, and a sum over them is the same tree without those leaves.
        """
        cuts = cut(self.samples, min(count, self.samples))
        return [range(self.first + places.start, self.first + places.stop) for places in cuts]


@dataclass(frozen=True)
class Steps:
    """All steps of a run, addressed by number in O(1).

    `length` is the number of training samples, `batch` the global batch. Either `epochs` or `steps` ends the run.
    """

    length: int
    batch: int
    drop_last: bool = False
    epochs: int | None = None
    steps: int | None = None

    @cached_property
    def per_epoch(self) -> int:
        """Updates in one epoch."""
        return self.length // self.batch if self.drop_last else -(-self.length // self.batch)

    @cached_property
    def samples_per_epoch(self) -> int:
        """Samples visited in one epoch."""
        return self.per_epoch * self.batch if self.drop_last else self.length

    @cached_property
    def total(self) -> int:
        """Updates in the whole run."""
        if self.steps is not None:
            return self.steps
        return self.per_epoch * (self.epochs or 0)

    @property
    def total_samples(self) -> int:
        """Samples seen by the whole run."""
        return self[self.total].samples_seen

    def __getitem__(self, number: int) -> Step:
        """Return step `number`; the number one past the last marks the end of the run."""
        epoch, within = divmod(number, self.per_epoch)
        first = within * self.batch
        last = within == self.per_epoch - 1
        samples = self.samples_per_epoch - first if last else self.batch
        return Step(number, epoch, first, samples, epoch * self.samples_per_epoch + first, last)
