"""A map-style dataset over the samples of shards, which are numbered by shard and by their offset in the shard."""

import hashlib
from collections.abc import Container, Sequence
from typing import Any, Protocol, final

import numpy as np

from lockstep.data.streams.index import FileMark, ShardIndex, mark_file
from lockstep.errors import UsageError, UserCodeError, os_error_as


class Shards(Protocol):
    """The shards of an iterable dataset, and the stages that turn what a shard contains into samples.

    - `label`: The name of the dataset for messages.
    - `names`: The display name of each shard, in order.
    - `unordered`: The names of the positions in an index that don't change the samples, such as byte offsets.
    """

    label: str
    names: Sequence[str]
    unordered: Sequence[str]

    def window(self, samples: int) -> range:
        """Return the samples that the dataset keeps of the `samples` samples of all shards."""

    def index(self, shard: int) -> ShardIndex:
        """Index a shard, or return its cached index. Raises UsageError if the shard can't be read."""

    def read(self, shard: int, index: ShardIndex, offset: int) -> Any:
        """Return a sample. `index.files` are the files in the state in which this process found them at the start.

        Raises DataError if the shard has changed since, and UserCodeError if a stage fails.
        """

    def sample_name(self, shard: int, index: ShardIndex, offset: int) -> str:
        """Return the display name of a sample."""


@final
class Sharded:
    """The samples of all shards, in order. `indexes` has the index of each shard.

    `digest` describes the shards and their samples. It is the same for the same samples in the same shards, wherever
    the files are. `indexed_here` are the shards that this process has indexed, which are all shards by default. The
    public attributes of `dataset` are copied, because a recipe reads some of them. Raises UsageError if a file has a
    different size than on the rank that indexed it.
    """

    def __init__(
        self,
        shards: Shards,
        indexes: Sequence[ShardIndex],
        dataset: Any = None,
        indexed_here: Container[int] | None = None,
    ) -> None:
        self.label = shards.label
        self.shards = shards
        self._indexes = [
            index if indexed_here is None or number in indexed_here else _with_local_marks(shards.label, index)
            for number, index in enumerate(indexes)
        ]
        self._ends = np.cumsum([0, *(index.samples for index in indexes)])
        self._window = shards.window(int(self._ends[-1]))
        content = hashlib.sha256("".join(index.digest(shards.unordered) for index in indexes).encode()).hexdigest()
        self.digest = f"{len(self._window):,} samples in {len(indexes):,} shards, {content[:16]}"
        attributes = {} if dataset is None else vars(dataset)
        public = {name: value for name, value in attributes.items() if not name.startswith("_")}
        vars(self).update({name: value for name, value in public.items() if name not in vars(self)})

    def __len__(self) -> int:
        return len(self._window)

    def __getitem__(self, number: int) -> Any:
        shard, offset = self._locate(number)
        return self.shards.read(shard, self._indexes[shard], offset)

    def name(self, number: int) -> str:
        """Return the display name of a sample: its shard, and its key or row."""
        shard, offset = self._locate(number)
        return self.shards.sample_name(shard, self._indexes[shard], offset)

    def _locate(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self._window):  # an IndexError ends a loop over the items
            raise IndexError(f"sample {number} of {len(self._window)}")
        position = self._window[number]
        shard = int(np.searchsorted(self._ends, position, side="right")) - 1
        return shard, position - int(self._ends[shard])


def only_sample(samples: Sequence[Any], name: str, unit: str, filter_stage: str) -> Any:
    """Return the only sample that the stages of a dataset return for a row or a sample, whose display name is `name`.

    Raises UserCodeError if there is no sample, or if there are several samples.
    """
    if len(samples) != 1:
        raise UserCodeError(
            f"{name}: the stages of the dataset return {len(samples)} samples for this {unit}, expected 1; drop "
            f"{unit}s with {filter_stage}, by a function of the {unit} only"
        )
    return samples[0]


def _with_local_marks(label: str, index: ShardIndex) -> ShardIndex:
    """Return the index with the state of local files on this host, where copies may have a different time."""
    return ShardIndex(index.samples, [_local_mark(label, mark) for mark in index.files], index.positions, index.names)


def _local_mark(label: str, mark: FileMark) -> FileMark:
    if not mark.is_local:
        return mark
    with os_error_as(UsageError, f"{label}: {mark.path}", "; put the same shards on every host"):
        current = mark_file(mark.path)
    if current.size != mark.size:
        raise UsageError(
            f"{label}: {mark.path} has {current.size:,} bytes, but {mark.size:,} bytes on the rank that indexed it; "
            f"put the same shards on every host"
        )
    return current
