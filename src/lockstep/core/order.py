"""The samples of each step, and how they are split into micro-batches.

All results depend only on the step number and on the settings of the run. A run can therefore resume at any step, on
any number of processes, without the state of a sampler or of a random number generator.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


def split_range(length: int, num_ranges: int) -> list[range]:
    """Split range(length) into `num_ranges` contiguous ranges whose sizes differ by at most one.

    Longer ranges come first. If `length` is less than `num_ranges`, the last ranges are empty.
    """
    return [get_subrange(length, num_ranges, index) for index in range(num_ranges)]


def get_subrange(length: int, num_ranges: int, index: int) -> range:
    """Return range `index` of `split_range(length, num_ranges)`."""
    size, remainder = divmod(length, num_ranges)
    first = index * size + min(index, remainder)
    return range(first, first + size + (index < remainder))


class Step(NamedTuple):
    """One optimizer step: its samples, as positions in the sample order of the epoch, and the progress of the run."""

    number: int  # step number in the run, from 0
    epoch: int  # from 0
    first: int  # position in the sample order of the epoch
    samples: int
    samples_seen: int  # number of samples of the run before this step
    last_of_epoch: bool
    total_weight: int | None = None  # total sample weight, if it differs from the number of samples
    weights: Mapping[str, int] | None = None  # total weight by name, in sorted order, if there are several losses

    @property
    def weight(self) -> int:
        """The divisor of the summed loss. With several losses, this is 0 only if all of their weights are 0."""
        return self.samples if self.total_weight is None else self.total_weight

    def microbatches(self, count: int) -> list[range]:
        """Split the step into at most `count` micro-batches, as positions in the sample order of the epoch.

        If the step has fewer samples than `count`, there is one micro-batch per sample. Leaving out empty micro-batches
        doesn't change the bits of the sums.
        """
        parts = split_range(self.samples, min(count, self.samples))
        return [range(self.first + positions.start, self.first + positions.stop) for positions in parts]


@dataclass(frozen=True)
class Steps:
    """All steps of a run, indexed by step number. Indexing takes constant time.

    `length` is the number of training samples, and `batch` is the global batch size. The run ends after `steps`
    updates, or after `epochs` epochs if `steps` is None.
    """

    length: int
    batch: int
    drop_last: bool = False
    epochs: int | None = None
    steps: int | None = None

    @cached_property
    def per_epoch(self) -> int:
        """The number of steps in an epoch."""
        return self.length // self.batch if self.drop_last else -(-self.length // self.batch)

    @cached_property
    def samples_per_epoch(self) -> int:
        """The number of samples visited in an epoch."""
        return self.per_epoch * self.batch if self.drop_last else self.length

    @cached_property
    def total(self) -> int:
        """The number of updates in the run."""
        if self.steps is not None:
            return self.steps
        return self.per_epoch * (self.epochs or 0)

    @property
    def total_samples(self) -> int:
        """The number of samples that the run processes in total."""
        return self[self.total].samples_seen

    def __getitem__(self, number: int) -> Step:
        """Return step `number`. `steps[steps.total]` is valid, and marks the end of the run."""
        epoch, step_of_epoch = divmod(number, self.per_epoch)
        first = step_of_epoch * self.batch
        last = step_of_epoch == self.per_epoch - 1
        samples = self.samples_per_epoch - first if last else self.batch
        return Step(number, epoch, first, samples, epoch * self.samples_per_epoch + first, last)
