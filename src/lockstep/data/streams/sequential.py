"""Reads rows by index from shards that only support sequential reads, with a cache of recently read rows."""

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, final

from lockstep.errors import DataError

_CACHE_BYTES: Final = 256 << 20  # maximum size of the cache, per dataset and process
_MAX_OPEN: Final = 8  # maximum number of open shards


class RowChunk(NamedTuple):
    """Consecutive rows of a shard, as a table or a list, with their number and memory size."""

    rows: Any
    num_rows: int
    num_bytes: int


@final
class SequentialReader:
    """Reads rows of shards by index.

    `open_shard` returns an iterator over the chunks of a shard, and `get_shard_name` returns its display name. If a row
    comes after the position of an open shard, reading continues from there. To read an earlier row that isn't cached,
    the shard is opened again and read from the start.
    """

    def __init__(self, open_shard: Callable[[int], Iterator[RowChunk]], get_shard_name: Callable[[int], str]) -> None:
        self._open_shard = open_shard
        self._name = get_shard_name
        self._ends: dict[int, list[int]] = {}  # by shard, the number of rows up to the end of each known chunk
        self._chunks: OrderedDict[tuple[int, int], RowChunk] = OrderedDict()
        self._num_bytes = 0
        # The iterator of each open shard, and the index of its next chunk. A forked process can't reuse an iterator,
        # because both processes would share its file position.
        self._open: OrderedDict[int, tuple[Iterator[RowChunk], int]] = OrderedDict()
        self._pid = os.getpid()

    def read_row(self, shard: int, row: int) -> tuple[RowChunk, int]:
        """Return the chunk that contains a row, and the index of the row in this chunk.

        Raises DataError if the row is missing, or if the chunks differ from those read earlier.
        """
        ends = self._ends.setdefault(shard, [])
        number = bisect_right(ends, row)
        chunk = self._chunks.get((shard, number))
        if chunk is None:
            chunk = self._read_chunk(shard, row, number, ends)
            number = bisect_right(ends, row)  # the chunk may come after other chunks that weren't known yet
        self._chunks.move_to_end((shard, number))
        return chunk, row - (ends[number - 1] if number else 0)

    def _read_chunk(self, shard: int, row: int, chunk_index: int, chunk_ends: list[int]) -> RowChunk:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._open.clear()
        chunks, position = self._open.pop(shard, (None, 0))
        if chunks is None or position > chunk_index:
            chunks, position = self._open_shard(shard), 0
        for chunk in chunks:
            start = chunk_ends[position - 1] if position else 0
            if position == len(chunk_ends):
                chunk_ends.append(start + chunk.num_rows)
            elif chunk_ends[position] != start + chunk.num_rows:
                break
            self._add_to_cache((shard, position), chunk)
            position += 1
            if row < chunk_ends[position - 1]:
                self._open[shard] = chunks, position
                if len(self._open) > _MAX_OPEN:
                    self._open.popitem(last=False)
                return chunk
        raise DataError(
            f"{self._name(shard)}: changed after it was indexed: row {row:,} is missing; start the run again, and "
            f"don't change the shards while it is running"
        )

    def _add_to_cache(self, key: tuple[int, int], chunk: RowChunk) -> None:
        if key in self._chunks:
            return
        self._chunks[key] = chunk
        self._num_bytes += chunk.num_bytes
        while self._num_bytes > _CACHE_BYTES and len(self._chunks) > 1:
            self._num_bytes -= self._chunks.popitem(last=False)[1].num_bytes
