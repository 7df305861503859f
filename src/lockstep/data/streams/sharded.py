"""A map-style dataset of the samples in several shards, in the order of the shards."""

import hashlib
from collections.abc import Container, Sequence
from typing import Any, Protocol, final

import numpy as np

from lockstep.data.streams.index import FileState, ShardIndex, get_file_state
from lockstep.errors import UsageError, UserCodeError, convert_os_error


class Shards(Protocol):
    """The shards of an iterable dataset, and the stages that convert their content to samples.

    - `label`: The name of the dataset for error messages.
    - `names`: The display name of each shard, in order.
    - `ignored_positions`: The positions in a ShardIndex that don't affect the samples, such as byte offsets.
    """

    label: str
    names: Sequence[str]
    ignored_positions: Sequence[str]

    def select_window(self, num_samples: int) -> range:
        """Return the range of samples in the dataset, out of the `num_samples` samples in all shards."""

    def index_shard(self, shard: int) -> ShardIndex:
        """Index a shard, or return its cached index. Raises UsageError if the shard can't be read."""

    def read_sample(self, shard: int, index: ShardIndex, offset: int) -> Any:
        """Return the sample at `offset` in a shard.

        `index.files` is the state of the files when this process started. Raises DataError if the files have
        changed since then, and UserCodeError if a stage fails.
        """

    def get_sample_name(self, shard: int, index: ShardIndex, offset: int) -> str:
        """Return the display name of a sample."""


@final
class ShardedDataset:
    """The samples of all shards, in order. `indexes` contains the index of each shard.

    `digest` identifies the shards and their samples, and doesn't depend on the paths of the files. `locally_indexed`
    contains the shards that this process indexed, and defaults to all shards. The public attributes of `dataset` are
    copied, because a recipe reads some of them. Raises UsageError if the size of a file differs from its size on the
    rank that indexed it.
    """

    def __init__(
        self,
        shards: Shards,
        indexes: Sequence[ShardIndex],
        dataset: Any = None,
        locally_indexed: Container[int] | None = None,
    ) -> None:
        self.label = shards.label
        self.shards = shards
        self._indexes = [
            index
            if locally_indexed is None or number in locally_indexed
            else _use_local_file_states(shards.label, index)
            for number, index in enumerate(indexes)
        ]
        self._ends = np.cumsum([0, *(index.num_samples for index in indexes)])
        self._window = shards.select_window(int(self._ends[-1]))
        content = hashlib.sha256(
            "".join(index.compute_digest(shards.ignored_positions) for index in indexes).encode()
        ).hexdigest()
        self.digest = f"{len(self._window):,} samples in {len(indexes):,} shards, {content[:16]}"
        attributes = {} if dataset is None else vars(dataset)
        public = {name: value for name, value in attributes.items() if not name.startswith("_")}
        vars(self).update({name: value for name, value in public.items() if name not in vars(self)})

    def __len__(self) -> int:
        return len(self._window)

    def __getitem__(self, number: int) -> Any:
        shard, offset = self._locate(number)
        return self.shards.read_sample(shard, self._indexes[shard], offset)

    def get_sample_name(self, index: int) -> str:
        """Return the display name of a sample: its shard, and its key or row."""
        shard, offset = self._locate(index)
        return self.shards.get_sample_name(shard, self._indexes[shard], offset)

    def _locate(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self._window):  # an IndexError ends an iteration over the dataset
            raise IndexError(f"sample {number} of {len(self._window)}")
        position = self._window[number]
        shard = int(np.searchsorted(self._ends, position, side="right")) - 1
        return shard, position - int(self._ends[shard])


def get_only_sample(samples: Sequence[Any], name: str, unit: str, filter_stage: str) -> Any:
    """Return the single sample that the stages of a dataset returned for the row or sample `name`.

    Raises UserCodeError if the stages returned no sample, or several samples.
    """
    if len(samples) != 1:
        raise UserCodeError(
            f"{name}: the stages of the dataset return {len(samples)} samples for this {unit}, expected 1; to drop "
            f"{unit}s, use {filter_stage} with a function that depends only on the {unit}"
        )
    return samples[0]


def _use_local_file_states(label: str, index: ShardIndex) -> ShardIndex:
    """Return the index with the state of the files on this host, whose modification times may be different."""
    return ShardIndex(
        index.num_samples, [_get_local_file_state(label, file) for file in index.files], index.positions, index.names
    )


def _get_local_file_state(label: str, indexed_state: FileState) -> FileState:
    if not indexed_state.is_local:
        return indexed_state
    with convert_os_error(UsageError, f"{label}: {indexed_state.path}", "; put the same shards on every host"):
        current = get_file_state(indexed_state.path)
    if current.size != indexed_state.size:
        raise UsageError(
            f"{label}: {indexed_state.path} has {current.size:,} bytes, but {indexed_state.size:,} bytes on the rank "
            "that indexed it; put the same shards on every host"
        )
    return current
