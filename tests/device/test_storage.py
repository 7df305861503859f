"""What the file system of a folder does: tried there, and nothing of it is left."""

import fcntl
from pathlib import Path

import pytest

from lockstep.device import storage


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    found = storage.storage(tmp_path / "runs" / "a")
    assert found["problem"] == ""
    assert found["renames"] is found["locks"] is True
    assert found["mb_s"] > 0
    assert 0 < found["sync_s"] < 10
    assert 0 < found["free"] <= found["all"]
    assert found["kind"]
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written() -> None:
    assert storage.storage(Path("/proc/runs"))["problem"]


def test_a_lock_that_keeps_nobody_out_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert storage.storage(tmp_path)["locks"] is False


def test_locks(tmp_path: Path) -> None:
    with storage.locked(tmp_path / "lock") as first, storage.locked(tmp_path / "lock") as second:
        assert (first, second) == (True, False)
    with storage.locked(tmp_path / "lock") as again:
        assert again
