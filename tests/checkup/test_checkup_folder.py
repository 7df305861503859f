"""The place of run folders is tried, and nothing of that is left."""

import fcntl
from functools import partial
from pathlib import Path

import pytest

from lockstep.checkup.folder import folder_facts
from lockstep.common.locking import exclusive


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    found = folder_facts(tmp_path / "runs" / "a")
    assert (found["problem"], found["locks"]) == ("", True)
    assert found["free"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written() -> None:
    assert folder_facts(Path("/proc/runs"))["problem"]


def test_a_lock_that_keeps_nobody_out_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert folder_facts(tmp_path)["locks"] is False


def test_locks(tmp_path: Path) -> None:
    lock = partial(exclusive, tmp_path / "lock", wait=False)
    with lock() as first, lock() as second:
        assert (first, second) == (True, False)
    with lock() as again:
        assert again
