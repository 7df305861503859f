"""Streams of Hugging Face: rows of any shard, stages for a row at a time, and what depends on other rows is refused."""

import json
import os
import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from datasets.distributed import split_dataset_by_node
from pyarrow import parquet

from lockstep.data.streams.find import open_stream
from lockstep.data.streams.index import get_file_state
from lockstep.data.streams.sequential import RowChunk, SequentialReader
from lockstep.errors import DataError, UsageError

# The library formats the results of a map for tensors again.
pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lockstep" / "shards"


def rows(count: int = 20, shards: int = 3) -> datasets.IterableDataset:
    columns = {"x": [[each, each + 0.5] for each in range(count)], "y": [each % 3 for each in range(count)]}
    return datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=shards)


def generated(files: list[int]) -> Iterator[dict[str, int]]:
    for file in files:
        for offset in range(file):
            yield {"x": 10 * file + offset, "y": offset % 3}


def files(folder: Path, kind: str, sizes: tuple[int, ...] = (4, 1, 6)) -> list[str]:
    paths = []
    for number, size in enumerate(sizes):
        columns = {"x": [10 * number + offset for offset in range(size)], "y": [offset % 3 for offset in range(size)]}
        path = folder / f"{number}.{kind}"
        if kind == "parquet":
            parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
        else:
            lines = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        paths.append(str(path))
    return paths


def stream(folder: Path, kind: str) -> datasets.IterableDataset:
    """Return the rows of files that exist."""
    paths = sorted(map(str, folder.glob(f"*.{kind}")))
    return datasets.load_dataset(kind, data_files=paths, streaming=True, split="train")


def of_files(folder: Path, kind: str) -> datasets.IterableDataset:
    files(folder, kind)
    return stream(folder, kind)


SOURCES: dict[str, Callable[[Path], datasets.IterableDataset]] = {
    "dictionary": lambda _: rows(),
    "json": lambda folder: of_files(folder, "json"),
    "parquet": lambda folder: of_files(folder, "parquet"),
    "generator": lambda _: datasets.IterableDataset.from_generator(generated, gen_kwargs={"files": [2, 0, 5]}),
    "torch": lambda _: rows().with_format("torch"),
    "concatenated": lambda folder: datasets.concatenate_datasets([rows(4, 2), rows(5, 1).map(lambda row: row)]),
}
STAGES: dict[str, Callable[[Any], Any]] = {
    "none": lambda stream: stream,
    "mapped": lambda stream: stream.map(lambda row: {"z": row["y"] + 1}, remove_columns=["x"]),
    "kept": lambda stream: stream.filter(lambda row: row["y"] != 1).map(lambda row: {"z": row["y"] + 1}),
    "part": lambda stream: stream.filter(lambda row: row["y"] != 1).skip(1).map(lambda row: row).take(3),
    "batches of one": lambda stream: stream.map(lambda rows: {"z": rows["y"]}, batched=True, batch_size=1),
    "columns": lambda stream: stream.select_columns(["y"]).rename_column("y", "target"),
}


# The library selects no columns of a stream without known features, as a concatenated stream is.
CASES = [case for case in product(SOURCES, STAGES) if case != ("concatenated", "columns")]


@pytest.mark.parametrize(("source", "stages"), CASES)
def test_samples_are_those_of_an_iteration_in_any_order(source: str, stages: str, tmp_path: Path) -> None:
    stream = STAGES[stages](SOURCES[source](tmp_path))
    expected = [*map(str, stream)]
    opened = open_stream(stream)
    assert len(opened) == len(expected) > 0
    numbers = [*range(len(opened))]
    random.Random(0).shuffle(numbers)
    found = {number: str(opened[number]) for number in numbers}
    assert [found[number] for number in range(len(expected))] == expected


def test_a_stream_starts_at_its_first_sample_whatever_was_done_with_it(tmp_path: Path) -> None:
    stream = of_files(tmp_path, "json")
    expected = [*stream]
    stream.set_epoch(3)
    stream.load_state_dict(stream.state_dict())
    next(iter(stream))
    opened = open_stream(stream)
    assert [opened[number] for number in range(len(opened))] == expected


def test_the_number_of_rows_of_a_file_is_kept(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(open_stream(of_files(tmp_path, "json"))) == 11
    assert len([*cache.iterdir()]) == 3
    with monkeypatch.context() as patched:
        patched.setattr("lockstep.data.streams.hugging_face.RowChunk", None)
        assert len(open_stream(stream(tmp_path, "json"))) == 11
    with open(tmp_path / "0.json", "a", encoding="utf-8") as file:
        file.write('{"x": 5, "y": 0}\n')
    assert len(open_stream(stream(tmp_path, "json"))) == 12


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_file_that_changes_is_named(kind: str, tmp_path: Path) -> None:
    opened = open_stream(of_files(tmp_path, kind))
    whole = (tmp_path / f"1.{kind}").read_bytes()
    (tmp_path / f"1.{kind}").write_bytes(whole + whole)
    assert opened[0]["x"] == 0
    with pytest.raises(
        DataError, match=rf"1\.{kind}: changed after it was indexed, from [\d,]+ to [\d,]+ bytes; start the run again"
    ):
        opened[4]
    os.remove(tmp_path / f"2.{kind}")
    with pytest.raises(DataError, match=rf"2\.{kind}: became unreadable after it was indexed: No such file"):
        opened[5]


def test_a_generator_that_gives_fewer_rows_is_named() -> None:
    given = [4]

    def fewer(files: list[int]) -> Iterator[dict[str, int]]:
        yield from ({"x": number} for number in range(given[0]))

    opened = open_stream(datasets.IterableDataset.from_generator(fewer, gen_kwargs={"files": [0]}))
    given[0] = 2
    with pytest.raises(DataError, match="shard 0: changed after it was indexed: row 3 is missing"):
        opened[3]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    damaged = of_files(tmp_path, "json")
    (tmp_path / "1.json").write_text('{"x": 1, "y": \n', encoding="utf-8")
    with pytest.raises(UsageError, match=r"cannot read .*1\.json: .*; check or replace it"):
        open_stream(damaged)


def test_what_fails_in_a_stage_is_named_with_its_row(tmp_path: Path) -> None:
    opened = open_stream(of_files(tmp_path, "json").map(lambda row: {"z": 1 // row["y"]}))
    with pytest.raises(UsageError, match=r"1\.json: row 0: ZeroDivisionError: .*test_stream_rows\.py:\d+"):
        opened[4]
    assert opened[1] == {"x": 1, "y": 1, "z": 1}
    with pytest.raises(UsageError, match=r"2\.json: row 3: ZeroDivisionError"):
        open_stream(of_files(tmp_path, "json").filter(lambda row: 1 // (row["x"] - 23)))


def test_a_map_that_returns_several_samples_is_refused() -> None:
    def twice(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"z": 2 * rows["y"]}

    stream = rows().map(twice, batched=True, batch_size=1, remove_columns=["x", "y"])
    with pytest.raises(UsageError, match="shard 0: row 2: the stages of the dataset return 2 samples for this row"):
        open_stream(stream)[2]
    with pytest.raises(UsageError, match="shard 0: row 0: a stage returned several samples"):
        open_stream(stream.filter(lambda row: True))


def test_a_filter_that_changes_its_mind_is_named() -> None:
    kept = [True]
    opened = open_stream(rows().filter(lambda row: kept[0]))
    kept[0] = False
    with pytest.raises(UsageError, match="shard 0: row 1: the stages of the dataset return 0 samples for this row"):
        opened[1]


async def later(row: dict[str, Any]) -> dict[str, Any]:
    return row


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "shuffle": (
        lambda: rows().shuffle(seed=0),
        "shuffle can't be applied .*; remove it: the order= of the run shuffles",
    ),
    "interleave": (lambda: datasets.interleave_datasets([rows(), rows()]), "interleave_datasets .*Weighted.*mixture"),
    "chances": (
        lambda: datasets.interleave_datasets([rows(), rows()], probabilities=[0.5, 0.5], seed=0),
        "interleave_datasets .*Weighted.*mixture",
    ),
    "repeat": (lambda: rows().repeat(2), "repeat .*; remove it, and set epochs= or steps="),
    "batch": (lambda: rows().batch(4), "batch can't .*; remove it, and set the batch of the run"),
    "tensors": (lambda: rows().with_format("torch").batch(4), "batch can't .*; remove it"),
    "batched": (lambda: rows().map(len, batched=True), r"map\(batched=True, batch_size=1000\) .*batch_size=1 if"),
    "filtered": (lambda: rows().filter(len, batched=True), r"filter\(batched=True, .*batch_size=1 if"),
    "numbered": (lambda: rows().map(len, with_indices=True), r"map\(with_indices=True\) .*store the index in a column"),
    "async": (lambda: rows().map(later), "map with an async function .*; pass a function without async"),
    "part of a rank": (lambda: split_dataset_by_node(rows(), 0, 2), "split_dataset_by_node.*; pass the whole dataset"),
    "tables": (lambda: rows().with_format("arrow"), r"returns tables \(with_format\('arrow'\)\); use"),
    "late filter": (lambda: rows().take(3).filter(bool), "filter after take isn't supported; call filter before take"),
    "inner part": (lambda: datasets.concatenate_datasets([rows().take(3), rows()]), "take before concatenate_datasets"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_other_rows_is_refused_with_what_to_write(name: str) -> None:
    make, match = REFUSED[name]
    with pytest.raises(UsageError, match=match):
        open_stream(make())


def test_a_reader_reads_on_where_it_was_and_forgets_what_was_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = []

    def parts(shard: int) -> Iterator[RowChunk]:
        starts.append(shard)
        return (RowChunk([10 * number, 10 * number + 1], 2, 40) for number in range(4))

    reader = SequentialReader(parts, str)
    monkeypatch.setattr("lockstep.data.streams.sequential._CACHE_BYTES", 80)

    def row(number: int) -> int:
        part, index = reader.read_row(0, number)
        return int(part.rows[index])

    assert [row(number) for number in range(8)] == [0, 1, 10, 11, 20, 21, 30, 31]
    assert starts == [0]
    assert row(4) == 20  # in memory
    assert starts == [0]
    assert row(1) == 1
    assert starts == [0, 0]
    assert row(3) == 11
    assert starts == [0, 0]


def test_a_remote_file_is_known_by_what_its_server_says() -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/streams/a.json", b"12")
    first = get_file_state("memory://streams/a.json")
    assert (first.size, first.is_local) == (2, False)
    memory.pipe("/streams/a.json", b"123")
    assert get_file_state("memory://streams/a.json") != first
    assert get_file_state("unknown://streams/a.json").size == -1
