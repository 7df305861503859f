"""Reads rows of shards that can only be read from their start, and keeps the parts that were read last in memory."""

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, final

from lockstep.errors import DataError

_CACHE_BYTES: Final = 256 << 20  # per dataset and process
_MAX_OPEN: Final = 8  # shards


class Part(NamedTuple):
    """Consecutive rows of a shard, and the memory that they take."""

    rows: Any
    size: int
    bytes: int


@final
class SequentialReader:
    """Returns rows of shards by index. `open_shard` returns an iterator over the parts of a shard, and its name.

    Reading a row that comes after the last row of an open shard continues there. Reading an earlier row that isn't in
    memory starts again at the beginning of the shard.
    """

    def __init__(self, open_shard: Callable[[int], Iterator[Part]], name: Callable[[int], str]) -> None:
        self._open_shard = open_shard
        self._name = name
        self._ends: dict[int, list[int]] = {}  # the number of rows up to the end of each known part, by shard
        self._parts: OrderedDict[tuple[int, int], Part] = OrderedDict()
        self._bytes = 0
        # The iterator of each open shard, and the number of the next part. A forked process can't share an iterator,
        # because it would also share the position of the file.
        self._open: OrderedDict[int, tuple[Iterator[Part], int]] = OrderedDict()
        self._pid = os.getpid()

    def row(self, shard: int, row: int) -> tuple[Part, int]:
        """Return the part that contains a row, and the index of the row in the part.

        Raises DataError if the shard has fewer rows, or different parts than before.
        """
        ends = self._ends.setdefault(shard, [])
        number = bisect_right(ends, row)
        part = self._parts.get((shard, number))
        if part is None:
            part = self._read(shard, row, number, ends)
            number = bisect_right(ends, row)  # the part may come after parts that weren't known before
        self._parts.move_to_end((shard, number))
        return part, row - (ends[number - 1] if number else 0)

    def _read(self, shard: int, row: int, number: int, ends: list[int]) -> Part:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._open.clear()
        parts, position = self._open.pop(shard, (None, 0))
        if parts is None or position > number:
            parts, position = self._open_shard(shard), 0
        for part in parts:
            start = ends[position - 1] if position else 0
            if position == len(ends):
                ends.append(start + part.size)
            elif ends[position] != start + part.size:
                break
            self._keep((shard, position), part)
            position += 1
            if row < ends[position - 1]:
                self._open[shard] = parts, position
                if len(self._open) > _MAX_OPEN:
                    self._open.popitem(last=False)
                return part
        raise DataError(
            f"{self._name(shard)}: changed after it was indexed: row {row:,} isn't there; keep the shards unchanged "
            f"during a run, and start it again"
        )

    def _keep(self, key: tuple[int, int], part: Part) -> None:
        if key in self._parts:
            return
        self._parts[key] = part
        self._bytes += part.bytes
        while self._bytes > _CACHE_BYTES and len(self._parts) > 1:
            self._bytes -= self._parts.popitem(last=False)[1].bytes
