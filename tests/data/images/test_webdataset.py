"""Archives: any picture is read where it lies, the index is made once, and nothing in a name leads anywhere."""

import io
import json
import os
import tarfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data.base import DataSet
from lockstep.data.images import tar_index
from lockstep.data.request import DataRequest
from lockstep.data.sources import open_data
from lockstep.data.streams.index import FileState
from lockstep.errors import TrainingError, UsageError


def _png(value: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (value, 2 * value, 3 * value)).save(stream, "PNG")
    return stream.getvalue()


def _write(file: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(file, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def _samples(first: int, count: int) -> dict[str, bytes]:
    numbers = range(first, first + count)
    return {
        name: content
        for each in numbers
        for name, content in ((f"{each:03}.png", _png(each)), (f"{each:03}.cls", f"{each % 3}\n".encode()))
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    _write(tmp_path / "train-0.tar", _samples(0, 5))
    _write(tmp_path / "train-1.tar", _samples(5, 4))
    _write(tmp_path / "val-0.tar", _samples(9, 3))
    return tmp_path


def _open(root: Path, **options: object) -> DataSet:
    return open_data(DataRequest("webdataset", str(root), image_size=8, options=options))


def test_pictures_of_all_archives_by_number(root: Path) -> None:
    data = _open(root)
    assert (len(data.train), len(data.validation)) == (9, 3)
    assert data.facts["classes"] == ["0", "1", "2"]
    images, targets = data.train.fetch(np.array([7, 0, 4]), None)
    assert images[:, :, 0, 0].tolist() == [[each, 2 * each, 3 * each] for each in (7, 0, 4)]
    assert targets.tolist() == [1, 0, 1]
    assert data.validation.fetch(np.array([2]), None)[1].tolist() == [2]
    assert not data.train.in_memory


def test_the_index_is_made_once_and_anew_for_another_archive(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _open(root)
    made: list[str] = []
    look = tar_index._scan_archive

    def counted(archive: tarfile.TarFile, state: FileState, label: str) -> tar_index.TarIndex:
        made.append(Path(state.path).name)
        return look(archive, state, label)

    monkeypatch.setattr(tar_index, "_scan_archive", counted)
    again = _open(root)
    assert not made
    for one, other in zip(first.train.fetch(np.arange(9), 1), again.train.fetch(np.arange(9), 1), strict=True):
        assert torch.equal(one, other)
    _write(root / "train-1.tar", _samples(5, 6))
    assert len(_open(root).train) == 11
    assert made == ["train-1.tar"]
    for kept in root.glob(".*.npz"):
        kept.write_bytes(b"PK\x03\x04 no index")
    assert len(_open(root).train) == 11
    assert len(made) == 4


def test_an_index_in_a_folder_that_cannot_be_written_is_not_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refused)
    assert len(_open(root).train) == 9
    assert not list(root.glob(".train-0.tar.cls.npz"))


def test_names_lead_nowhere_and_links_are_passed_over(tmp_path: Path) -> None:
    members = {"../../evil.png": _png(1), "../../evil.cls": b"0", "/abs/b.png": _png(2), "/abs/b.cls": b"1"}
    _write(tmp_path / "train.tar", members)
    with tarfile.open(tmp_path / "train.tar", "a") as archive:
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    data = _open(tmp_path, validation=0)
    assert len(data.train) == 2
    assert data.validation is None
    assert data.train.fetch(np.array([1]), None)[0][0, :, 0, 0].tolist() == [2, 4, 6]
    assert {each.name for each in tmp_path.iterdir()} == {"train.tar", ".train.tar.cls.npz"}


def test_labels_from_json_and_names_of_classes(tmp_path: Path) -> None:
    _write(tmp_path / "train.tar", {"a.png": _png(1), "a.json": json.dumps({"kind": 1, "x": 2}).encode()})
    data = _open(tmp_path, label="kind", classes=["cat", "dog"], validation=0)
    assert data.facts["classes"] == ["cat", "dog"]
    assert data.train.fetch(np.array([0]), None)[1].tolist() == [1]
    with pytest.raises(UsageError, match=r"a: a\.json has no integer 'sort': KeyError"):
        _open(tmp_path, label="sort", validation=0)
    with pytest.raises(UsageError, match=r"1 classes, but the images have classes 1 to 1; set at least 2 classes"):
        _open(tmp_path, label="kind", classes=1, validation=0)


def test_a_share_is_validation_s(root: Path) -> None:
    (root / "val-0.tar").unlink()
    data = _open(root, validation=0.5)
    assert len(data.train) + len(data.validation) == 9
    seen = [split.fetch(np.arange(len(split)), None)[0][:, 0, 0, 0].tolist() for split in (data.train, data.validation)]
    assert sorted(seen[0] + seen[1]) == [*range(9)]


def test_what_is_wrong_is_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"options\.validation: not supported with val archives; remove it"):
        _open(root, validation=0.1)
    (root / "val-0.tar").unlink()
    with pytest.raises(UsageError, match=r"options\.validation: missing, but required without val archives; set"):
        _open(root)
    with pytest.raises(UsageError, match=r"neither train\*\.tar nor train/\*\.tar in .*absent"):
        _open(root / "absent")
    _write(root / "train-2.tar", {"a.png": _png(1)})
    with pytest.raises(
        UsageError, match=r"train-2\.tar: a has neither a \.cls nor a \.json file; correct recipe\.data\.options\.label"
    ):
        _open(root, validation=0)
    _write(root / "train-2.tar", {"a.png": _png(1), "a.cls": b"99999999999999999999"})
    with pytest.raises(UsageError, match=r"train-2\.tar: a: expected a class from 0 to 16,777,215, got 9{20}; correct"):
        _open(root, validation=0)
    (root / "train-2.tar").write_bytes(b"\x1f\x8b no tar" * 100)
    with pytest.raises(UsageError, match=r"cannot read .*train-2\.tar as a tar archive: .*; use a complete"):
        _open(root, validation=0)


def test_a_damaged_picture_names_archive_and_member(tmp_path: Path) -> None:
    _write(tmp_path / "train.tar", {"a.png": b"no picture", "a.cls": b"0", **_samples(1, 2)})
    data = _open(tmp_path, validation=0)
    with pytest.raises(TrainingError, match=r"train\.tar: a: cannot be read as an image: "):
        data.train.fetch(np.array([1, 0]), None)
    with (tmp_path / "train.tar").open("r+b") as file:
        file.truncate(600)
    with pytest.raises(
        TrainingError, match=r"train\.tar: changed after it was indexed, from [\d,]+ to 600 bytes; start the run again"
    ):
        data.train.fetch(np.array([2]), None)


def test_an_archive_that_is_written_again_is_named(root: Path) -> None:
    data = _open(root)
    _write(root / "train-0.tar", _samples(1, 5))  # of the same size
    with pytest.raises(TrainingError, match=r"train-0\.tar: changed after it was indexed: .* was written again; start"):
        data.train.fetch(np.array([0]), None)
    data.train.fetch(np.array([6]), None)


@pytest.mark.parametrize("rest", [0, 100, 512, 700])
def test_an_archive_that_was_cut_off_is_none_that_has_less_pictures(root: Path, rest: int) -> None:
    """Wherever it was: between two members, or in the header of one."""
    with tarfile.open(root / "train-1.tar") as archive:
        third = archive.getmembers()[4]
    with (root / "train-1.tar").open("r+b") as file:
        file.truncate(third.offset + rest)
    with pytest.raises(UsageError, match=r"train-1\.tar (is truncated or damaged at byte|as a tar archive)"):
        _open(root)
    assert not (root / ".train-1.tar.cls.npz").exists()


@pytest.mark.parametrize("field", [slice(100, 108), slice(124, 136), slice(136, 148), slice(257, 265)])
@pytest.mark.parametrize("number", [b"\x80\x01" + bytes(10), b"\xff" * 12, b"\x80" + b"\xff" * 11, b"7" * 12])
def test_numbers_that_no_archive_can_have_are_refused(root: Path, field: slice, number: bytes) -> None:
    """Such as a size of 2^88 bytes: base 256 has room for it."""
    header = bytearray((root / "train-0.tar").read_bytes())
    header[field] = number[: field.stop - field.start]
    header[148:156] = b"%06o\0 " % sum(header[:148] + b" " * 8 + header[156:512])
    (root / "train-0.tar").write_bytes(header)
    with pytest.raises(UsageError, match=r"train-0\.tar") if field.start == 124 else nullcontext():
        _open(root)


def test_a_label_that_is_nested_too_deeply_is_named(root: Path) -> None:
    _write(root / "train-0.tar", {"0.png": _png(1), "0.json": b"[" * 100_000})
    with pytest.raises(UsageError, match=r"0: 0\.json has no integer 'cls'"):
        _open(root)
