"""WebDataset pipelines: a sample is read where it lies, and what depends on other samples is refused."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from webdataset import WebDataset

from lockstep.data.streams import tar_members
from lockstep.data.streams.find import open_stream
from lockstep.errors import DataError, UsageError

SIZES = (3, 0, 5)

# The library leaves the archives open that it iterates over.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def write(path: Path, samples: list[dict[str, Any]]) -> str:
    with webdataset.TarWriter(str(path)) as writer:
        for sample in samples:
            writer.write(sample)
    return str(path)


def sample(shard: int, offset: int) -> dict[str, Any]:
    return {"__key__": f"{shard}/{offset}", "npy": np.full(2, 10 * shard + offset), "cls": offset % 2, "Json": b"{}"}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [
        write(tmp_path / f"{shard}.tar", [sample(shard, offset) for offset in range(size)])
        for shard, size in enumerate(SIZES)
    ]


def plain(files: Any, **options: Any) -> WebDataset:
    return WebDataset(files, shardshuffle=False, **options)


def text(value: Any) -> str:
    return repr(sorted(value.items()) if isinstance(value, dict) else value)


PIPELINES: dict[str, Callable[[list[str]], Any]] = {
    "bytes": plain,
    "braces": lambda files: plain(files[0].replace("0.tar", "{0..2}.tar")),
    "decoded": lambda files: plain(files).decode().to_tuple("npy", "cls").map_tuple(np.sum, int),
    "selected": lambda files: plain(files).decode().select(lambda each: each["cls"]).map(lambda each: each["__key__"]),
    "renamed": lambda files: plain(files).rename(x="npy").map_dict(x=len).extract_keys("x", "cls"),
    "some files": lambda files: plain(files, select_files=lambda name: name.endswith("cls")),
    "other names": lambda files: plain(files, rename_files=lambda name: name.replace("cls", "label")),
    "split": lambda files: plain(files, nodesplitter=webdataset.split_by_node),
    "stages": lambda files: webdataset.DataPipeline(
        webdataset.SimpleShardList(files), webdataset.split_by_worker, webdataset.tarfile_to_samples()
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_samples_are_those_of_an_iteration_in_any_order(name: str, files: list[str]) -> None:
    pipeline = PIPELINES[name](files)
    expected = [*map(text, pipeline)]
    opened = open_stream(pipeline)
    numbers = [*range(len(opened))]
    random.Random(0).shuffle(numbers)
    found = {number: text(opened[number]) for number in numbers}
    assert [found[number] for number in range(len(expected))] == expected
    assert expected


def test_a_sample_has_the_name_of_its_shard_and_key(files: list[str]) -> None:
    opened = open_stream(plain(files))
    assert opened.get_sample_name(3) == f"{files[2]}: 2/0"
    with pytest.raises(IndexError):
        opened[8]


def test_an_index_is_kept_as_long_as_the_archive_is_the_same(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = open_stream(plain(files)).digest
    with monkeypatch.context() as patched:
        patched.setattr("lockstep.data.streams.webdataset.scan_members", None)
        assert open_stream(plain(files)).digest == digest
    write(tmp_path / "1.tar", [sample(1, 0)])
    assert len(open_stream(plain(files))) == 9
    [cache] = tmp_path.glob(".1.tar.samples-*")
    cache.write_bytes(b"damaged")
    assert len(open_stream(plain(files))) == 9


def test_the_digest_follows_the_samples_and_not_the_place(files: list[str], tmp_path: Path) -> None:
    digest = open_stream(plain(files)).digest
    (tmp_path / "moved").mkdir()
    moved = [
        os.rename(file, tmp_path / "moved" / Path(file).name) or f"{tmp_path}/moved/{Path(file).name}" for file in files
    ]
    assert open_stream(plain(moved)).digest == digest
    assert open_stream(plain(moved[::-1])).digest != digest
    write(Path(moved[1]), [sample(1, 0)])
    assert open_stream(plain(moved)).digest != digest


def test_an_archive_that_changes_is_named(files: list[str], tmp_path: Path) -> None:
    opened = open_stream(plain(files))
    os.utime(files[0], (1, 1))
    with pytest.raises(DataError, match=r"0\.tar: changed after it was indexed: .* written again"):
        opened[0]
    assert opened[3]["__key__"] == "2/0"
    with open(files[2], "ab") as archive:
        archive.write(bytes(512))
    with pytest.raises(
        DataError, match=r"2\.tar: changed after it was indexed, from [\d,]+ to [\d,]+ bytes; start the run again"
    ):
        opened[3]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (lambda whole: b"", "cannot read .*0.tar as a tar archive: empty file; use a complete tar"),
        (lambda whole: b"no archive " * 100, "cannot read .*0.tar as a tar archive"),
        (lambda whole: whole[: len(whole) // 2], "0.tar (is truncated or damaged at byte|as a tar archive)"),
    ],
)
def test_a_damaged_archive_is_named(content: Callable[[bytes], bytes], match: str, files: list[str]) -> None:
    Path(files[0]).write_bytes(content(Path(files[0]).read_bytes()))
    with pytest.raises(UsageError, match=match):
        open_stream(plain(files))


def test_a_missing_archive_is_named(files: list[str]) -> None:
    os.remove(files[1])
    with pytest.raises(
        UsageError, match=r"cannot read .*1\.tar: No such file or directory; pass the paths of existing"
    ):
        open_stream(plain(files))


def test_a_file_that_a_sample_lacks_is_named_with_the_sample(tmp_path: Path) -> None:
    lacking = {name: value for name, value in sample(0, 1).items() if name != "cls"}
    file = write(tmp_path / "0.tar", [sample(0, 0), lacking])
    opened = open_stream(plain([file]).to_tuple("npy", "cls"))
    assert len(opened[0]) == 2
    with pytest.raises(UsageError, match=r"0\.tar: 0/1: ValueError: didn't find \['cls'\] in"):
        opened[1]


def test_a_map_that_drops_a_sample_is_refused_with_what_to_write(files: list[str]) -> None:
    opened = open_stream(plain(files).map(lambda each: None))
    with pytest.raises(
        UsageError, match=r"0\.tar: 0/0: the stages .* return 0 samples .*; to drop samples, use \.select"
    ):
        opened[0]


REFUSED: dict[str, tuple[Callable[[list[str]], Any], str]] = {
    "shuffle": (lambda files: plain(files).shuffle(100), "stage shuffle .*; remove it: the order= of the run shuffles"),
    "shards": (lambda files: WebDataset(files, shardshuffle=100), "stage shuffle .*; remove it: the order="),
    "detshuffle": (lambda files: WebDataset(files, shardshuffle=9, detshuffle=True), "stage detshuffle .*order="),
    "resampled": (lambda files: plain(files, resampled=True), "ResampledShards .*orders.Weighted"),
    "batched": (lambda files: plain(files).batched(2), "stage batched .*set the batch of the run"),
    "rsample": (lambda files: plain(files).rsample(0.5), "stage rsample .*select samples with order="),
    "slice": (lambda files: plain(files).slice(2), "stage islice .*select samples with order="),
    "epoch": (
        lambda files: plain(files).with_epoch(2),
        "repeats its samples; remove with_epoch .* set epochs= or steps=",
    ),
    "own stage": (lambda files: plain(files).compose(lambda samples: samples), r"<lambda> .*; use \.map, \.select"),
    "own splitter": (lambda files: plain(files, nodesplitter=lambda urls: urls), "<lambda> .*nodesplitter=None"),
    "skipped": (
        lambda files: plain(files).map(len, handler=webdataset.warn_and_continue),
        r"stage map skips samples that fail; .*\.select",
    ),
    "unread": (lambda files: plain(files, handler=webdataset.ignore_and_continue), "StreamingOpen skips samples"),
    "remote": (lambda files: plain("https://localhost/{0..3}.tar"), r"0\.tar and 3 more: not a local file.*cache_dir="),
    "loader": (lambda files: webdataset.WebLoader(plain(files)), "stage DataLoader .*pass the dataset instead"),
    "mixed": (lambda files: webdataset.DataPipeline(webdataset.RandomMix([plain(files)])), "RandomMix .*mixture"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_other_samples_is_refused_with_what_to_write(name: str, files: list[str]) -> None:
    make, match = REFUSED[name]
    with pytest.raises(UsageError, match=match):
        open_stream(make(files))


def test_a_remote_shard_is_downloaded_to_the_folder_of_the_pipeline(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    pipeline = plain([f"pipe:cat {file}" for file in (files[0], files[2])], cache_dir=str(tmp_path / "kept"))
    opened = open_stream(pipeline)
    assert [opened[number]["__key__"] for number in (0, 7)] == ["0/0", "2/4"]
    assert len([*(tmp_path / "kept").glob("*.tar")]) == 2


def test_members_are_found_by_their_headers(files: list[str]) -> None:
    index = open_stream(plain(files)).shards.index_shard(0)
    assert [name for name, _, _ in tar_members.iterate_spans(index, 1)] == ["json", "cls", "npy"]
