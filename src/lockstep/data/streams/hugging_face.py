"""The shards of a Hugging Face IterableDataset, whose stages are applied to one row at a time."""

import copy
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from lockstep.common.user_code import UserCode, describe_error
from lockstep.data.streams.index import FileState, ShardIndex, check_unchanged, get_file_state, load_or_scan
from lockstep.data.streams.rows import RowStages, copy_dataset
from lockstep.data.streams.sequential import RowChunk, SequentialReader
from lockstep.data.streams.sharded import get_only_sample
from lockstep.data.streams.stages import SourceShard, split_shards, split_windows
from lockstep.errors import DataError, LockstepError, UsageError, UserCodeError, convert_error

_TABLE_FORMATS: Final = ("arrow", "pandas", "polars")
_ROWS_PER_CHUNK: Final = 64  # number of rows per chunk, for a shard that is read row by row


def open_hugging_face_shards(dataset: Any) -> "HuggingFaceShards | None":
    """Return the shards of a Hugging Face IterableDataset, or None if `dataset` is any other object.

    Raises UsageError if the dataset has a stage that Lockstep can't apply to one row at a time.
    """
    module = sys.modules.get("datasets.iterable_dataset")
    is_stream = module is not None and isinstance(dataset, module.IterableDataset)
    return HuggingFaceShards(dataset) if is_stream else None


@final
class HuggingFaceShards:
    """The shards of an IterableDataset. See Shards. A sample is a dict from column name to value."""

    ignored_positions: Sequence[str] = ()

    def __init__(self, dataset: Any) -> None:
        self.label = "dataset IterableDataset"
        if dataset._distributed is not None:
            raise UsageError(
                f"{self.label}: has only the samples of one rank (split_dataset_by_node); pass the whole dataset, "
                f"because Lockstep distributes the samples"
            )
        if dataset._formatting is not None and dataset._formatting.format_type in _TABLE_FORMATS:
            raise UsageError(
                f"{self.label}: returns tables (with_format({dataset._formatting.format_type!r})); use "
                f"with_format('torch') or with_format(None)"
            )
        self._windows, inner = split_windows(self.label, dataset._ex_iterable)
        self._shards = split_shards(self.label, inner)
        self.names: Sequence[str] = [_get_shard_name(number, shard) for number, shard in enumerate(self._shards)]
        self._dataset = copy_dataset(dataset)
        self._dataset._epoch = 0  # set_epoch changes the order of the shards
        self._dataset._starting_state_dict = None
        self._reader = SequentialReader(self._iterate_chunks, self.names.__getitem__)
        self._file_states: dict[int, Sequence[FileState]] = {}  # the state of each shard's files when it was indexed
        self._tables: dict[int, Any] = {}
        self._stages: dict[tuple[Any, ...], RowStages] = {}

    def select_window(self, num_samples: int) -> range:
        """See Shards."""
        window = range(num_samples)
        for stage in self._windows:
            window = window[stage.n :] if type(stage).__name__.startswith("Skip") else window[: stage.n]
        return window

    def index_shard(self, shard: int) -> ShardIndex:
        """See Shards. For shards in files, the number of rows is cached. Filters are applied each time."""
        source = self._shards[shard]
        with convert_error(UsageError, OSError, f"{self.label}: {self.names[shard]}", "; check that the file exists"):
            files = [get_file_state(path) for path in source.files]
        if source.filters:
            kept = np.array([*self._iterate_kept_rows(shard)], np.int64)
            return ShardIndex(len(kept), files, {"rows": kept})
        if source.table is not None:
            return ShardIndex(len(source.table), files)

        def scan() -> ShardIndex:
            return ShardIndex(sum(chunk.num_rows for chunk in self._iterate_chunks(shard, UsageError)), files)

        return load_or_scan(self._get_cache_path(source, files), files, scan)

    def read_sample(self, shard: int, index: ShardIndex, offset: int) -> Any:
        """See Shards."""
        source, row = self._shards[shard], _get_row_index(index, offset)
        self._file_states.setdefault(shard, index.files)
        key = (type(source.source), *map(id, source.stages))
        if key not in self._stages:
            self._stages[key] = RowStages(self._dataset, source, source.stages)
        content = self._read_row(shard, row)
        with UserCode(f"{self.names[shard]}: row {row}"):
            samples = self._stages[key].run(content)
        return get_only_sample(samples, f"{self.names[shard]}: row {row}", "row", "filter")

    def get_sample_name(self, shard: int, index: ShardIndex, offset: int) -> str:
        """See Shards."""
        return f"{self.names[shard]}: row {_get_row_index(index, offset)}"

    def _iterate_kept_rows(self, shard: int) -> Iterator[int]:
        """Yield the indices of the rows that pass the filters.

        Raises UserCodeError if a stage fails, or if it returns several samples for a row.
        """
        stages = RowStages(self._dataset, self._shards[shard], self._shards[shard].filters)
        name, previous = f"{self.label}: {self.names[shard]}", -1
        try:
            for row in stages.iterate_kept_rows(self._iterate_rows(shard)):
                if row == previous:
                    raise UserCodeError(
                        f"{name}: row {row}: a stage returned several samples for this row; use functions that return "
                        f"one sample per row"
                    )
                yield row
                previous = row
        except LockstepError:
            raise
        except Exception as error:  # user functions may raise any exception
            raise UserCodeError(f"{name}: row {stages.current_row}: {describe_error(error)}") from error

    def _iterate_rows(self, shard: int) -> Iterator[Any]:
        """Yield all rows of a shard."""
        source = self._shards[shard]
        if source.table is not None:
            yield from (self._read_row(shard, row) for row in range(len(source.table)))
            return
        for chunk in self._iterate_chunks(shard, UsageError):
            yield from (_select_row(chunk, row) for row in range(chunk.num_rows))

    def _read_row(self, shard: int, row: int) -> Any:
        """Return a row in the format of the shard's source: a table with a single row, or a dict."""
        source = self._shards[shard]
        if source.table is None:
            return _select_row(*self._reader.read_row(shard, row))
        if shard not in self._tables:
            self._tables[shard] = source.table.with_format("arrow")
        return self._tables[shard][row : row + 1]

    def _iterate_chunks(self, shard: int, error_type: type[LockstepError] = DataError) -> Iterator[RowChunk]:
        """Yield the rows of a shard in chunks, as tables or lists. Raises an `error_type` if reading fails."""
        source = self._shards[shard]
        for file_state in self._file_states.get(shard, ()):
            check_unchanged(file_state)
        arguments = copy.deepcopy(source.arguments)
        with convert_error(
            error_type, Exception, f"{self.label}: cannot read {self.names[shard]}", "; check or replace it"
        ):
            if source.has_tables:
                for _, table in source.generate(**arguments):
                    yield RowChunk(table, len(table), table.nbytes)
                return
            rows = (row for _, row in source.generate(**arguments))
            while chunk := [*islice(rows, _ROWS_PER_CHUNK)]:
                yield RowChunk(chunk, len(chunk), _estimate_bytes(chunk))

    def _get_cache_path(self, source: SourceShard, files: Sequence[FileState]) -> Path | None:
        """Return the path at which the number of rows of a shard is cached, or None if it can't be cached."""
        if not files or any(file.size < 0 for file in files):
            return None
        key = self._source_hashes.get(id(source.source))
        if key is None:
            return None
        arguments = json.dumps(dict(source.arguments), default=lambda value: type(value).__name__)
        digest = hashlib.sha256(f"{key} {arguments} {files}".encode()).hexdigest()
        folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(folder).expanduser() / "lockstep" / "shards" / f"{digest[:32]}.npz"

    @cached_property
    def _source_hashes(self) -> Mapping[int, str]:
        """The hash of each source's code and settings, by the ID of the source. Sources without a hash are missing."""
        hashes: dict[int, str] = {}
        version, hasher = sys.modules["datasets"].__version__, sys.modules["datasets.fingerprint"].Hasher
        for source, generate in {id(shard.source): shard.generate for shard in self._shards}.items():
            with suppress(Exception):
                hashes[source] = hasher.hash([version, generate])
        return hashes


def _get_shard_name(shard_number: int, shard: SourceShard) -> str:
    files = [] if shard.table is not None else shard.files
    return files[0] if files else f"shard {shard_number}"


def _get_row_index(shard_index: ShardIndex, sample_offset: int) -> int:
    return int(shard_index.positions["rows"][sample_offset]) if "rows" in shard_index.positions else sample_offset


def _select_row(chunk: RowChunk, row: int) -> Any:
    return chunk.rows[row] if isinstance(chunk.rows, list) else chunk.rows.slice(row, 1)


def _estimate_bytes(value: Any) -> int:
    """Return the approximate memory of a value in bytes."""
    if isinstance(value, Mapping):
        return sum(map(_estimate_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_estimate_bytes, value))
    if isinstance(value, bytes | str):
        return len(value)
    return int(getattr(value, "nbytes", 0)) or sys.getsizeof(value)
