"""Streams: samples a second in three orders, and the time to index the shards, each in one process.

A row is 8 KiB of random bytes, which are not decoded. Parquet files have row groups of 1,000 rows. A contestant goes on
in its order where its last turn ended. So the first turn, which does not count, fills the rows that it keeps in memory.
The files are in the page cache of the machine: what a disk takes is not measured.
"""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.processes import Contestant, Turn, take_turns, timed
from benchmarks.report import Result, compare
from lockstep.comm.world import World
from lockstep.data.streams.find import open_stream

ROW_BYTES: Final = 8192
ROWS_PER_FILE, ROWS_PER_ARCHIVE, ROWS_PER_BLOCK = 4096, 2000, 8000
ORDERS: Final = ("sequential", "in_blocks", "shuffled")
SAMPLES: Final = 8000  # a turn
SAMPLES_FROM_THE_START: Final = 100  # a turn of a full shuffle of more than what is kept in memory
SCANNED, SAVED = "scanned", "row counts saved"

Open = Callable[[Sequence[str]], Any]


def results(quick: bool) -> list[Result]:
    """Measure what fits into the memory that a process keeps, what doesn't, and archives, which are read anywhere."""
    with tempfile.TemporaryDirectory(prefix="lockstep-streams-") as name:
        folder = Path(name)
        rows, archived = (64, 64) if quick else (ROWS_PER_FILE, ROWS_PER_ARCHIVE)
        large = [_write_parquet(folder / f"{number:02}.parquet", rows, number) for number in range(16)]
        archives = [_write_archive(folder / f"{number}.tar", archived, number) for number in range(2)]
        cache, turns = str(folder / "cache"), 2 if quick else 5
        return [
            _reading("streams-16-files", _parquet, large, cache, turns, SAMPLES_FROM_THE_START),
            _reading("streams-4-files", _parquet, large[:4], cache, turns, SAMPLES),
            _reading("streams-2-archives", _archives, archives, cache, turns, SAMPLES),
            _indexing(large, cache, turns),
        ]


def _reading(name: str, open_: Open, files: list[str], cache: str, turns: int, shuffled: int) -> Result:
    counts = {order: shuffled if order == "shuffled" else SAMPLES for order in ORDERS}
    contestants = {
        order: Contestant(partial(_read, open_, files, cache, order, count)) for order, count in counts.items()
    }
    seconds = take_turns(contestants, turns)
    speeds = {order: [counts[order] / each for each in own] for order, own in seconds.items()}
    size = sum(os.path.getsize(file) for file in files) / 2**20
    title = f"streams: {len(files)} files of {Path(files[0]).suffix[1:]}, {size:.0f} MiB, rows of {ROW_BYTES:,} bytes"
    return compare(name, title, "samples/s", speeds, "sequential")


def _indexing(files: list[str], cache: str, turns: int) -> Result:
    contestants = {SCANNED: Contestant(partial(_index, files, None)), SAVED: Contestant(partial(_index, files, cache))}
    size = sum(os.path.getsize(file) for file in files) / 2**20
    title = f"streams: index {len(files)} files of parquet, {size:.0f} MiB"
    return compare("streams-index", title, "s", take_turns(contestants, turns), SCANNED)


def _read(open_: Open, files: Sequence[str], cache: str, order: str, count: int, world: World) -> Turn:
    os.environ["XDG_CACHE_HOME"] = cache
    samples = open_stream(open_(files))
    numbers = cycle(_order(order, len(samples)))

    def read() -> None:
        for number in islice(numbers, count):
            samples[number]

    return timed(read, world)


def _index(files: Sequence[str], cache: str | None, world: World) -> Turn:
    """Return a turn that indexes files, each time without saved row counts if `cache` is None."""
    stream = _parquet(files)

    def index() -> None:
        with tempfile.TemporaryDirectory() as empty:
            os.environ["XDG_CACHE_HOME"] = cache or empty
            open_stream(stream)

    return timed(index, world)


def _order(name: str, samples: int) -> list[int]:
    """Return the numbers of an order. `in_blocks` is the function of docs/data.md."""
    draw = np.random.default_rng([0, 0])
    if name == "sequential":
        return [*range(samples)]
    if name == "shuffled":
        return [*map(int, draw.permutation(samples))]
    firsts = draw.permutation(range(0, samples, ROWS_PER_BLOCK))
    blocks = [np.arange(first, min(first + ROWS_PER_BLOCK, samples)) for first in firsts]
    return [*map(int, np.concatenate([draw.permutation(block) for block in blocks]))]


def _parquet(files: Sequence[str]) -> Any:
    from datasets import load_dataset

    return load_dataset("parquet", data_files=[*files], split="train", streaming=True)


def _archives(files: Sequence[str]) -> Any:
    from webdataset import WebDataset  # type: ignore[import-untyped]

    return WebDataset([*files], shardshuffle=False).to_tuple("bin")


def _rows(count: int, seed: int) -> list[bytes]:
    draw = np.random.default_rng(seed)
    return [draw.bytes(ROW_BYTES) for _ in range(count)]


def _write_parquet(file: Path, rows: int, seed: int) -> str:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"content": _rows(rows, seed)}), file, row_group_size=1000)
    return str(file)


def _write_archive(file: Path, rows: int, seed: int) -> str:
    with tarfile.open(file, "w") as archive:
        for number, content in enumerate(_rows(rows, seed)):
            member = tarfile.TarInfo(f"{number:06}.bin")
            member.size = len(content)
            archive.addfile(member, BytesIO(content))
    return str(file)
