"""Files are whole or absent."""

import hashlib
import os
from pathlib import Path

import pytest

from lockstep.training.checkpoint import durable


def test_write_tells_what_the_file_holds(tmp_path: Path) -> None:
    written = durable.write(tmp_path / "a", [b"one", memoryview(b"two"), b""])
    assert (tmp_path / "a").read_bytes() == b"onetwo"
    assert written == durable.FileRecord(hashlib.sha256(b"onetwo").hexdigest(), 6)


def test_write_never_takes_an_existing_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        durable.write(tmp_path / "a", [b"new"])
    assert (tmp_path / "a").read_bytes() == b"old"


def test_replace_leaves_the_old_content_when_the_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    durable.replace(path, b"old")

    def fails(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        durable.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_replace_takes_over_what_a_killed_run_left(tmp_path: Path) -> None:
    (tmp_path / f".a.tmp-{os.getpid()}").write_bytes(b"half")
    durable.replace(tmp_path / "a", b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["a"]


def test_point_makes_a_relative_link_and_moves_it(tmp_path: Path) -> None:
    for target in ("first", "second"):
        durable.replace_link(tmp_path / "latest", target)
        assert os.readlink(tmp_path / "latest") == target
    assert os.listdir(tmp_path) == ["latest"]


def test_what_replaces_a_file_has_its_name_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    durable.replace(tmp_path / "a", b"new")
    assert synced == [(tmp_path / "a").stat().st_ino, tmp_path.stat().st_ino]
