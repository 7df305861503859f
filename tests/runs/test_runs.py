"""Run folders are found by what lies in them, and whether one is at work by its lock."""

import fcntl
import json
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.runs.runs import (
    JOB,
    RESULT,
    SubmittedJob,
    find_run_folders,
    is_locked,
    read_failure_reason,
    read_job,
    record_job,
)


def test_folders_of_runs_are_found_below_and_hidden_ones_are_not(tmp_path: Path) -> None:
    for place, sign in (("b", "events.jsonl"), ("a/deep", "job.json"), (".old", "events.jsonl"), ("c", "lock")):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / sign).touch()
    (tmp_path / "b" / "inner").mkdir()
    (tmp_path / "b" / "inner" / "lock").touch()  # of a run's own
    assert [path.relative_to(tmp_path).as_posix() for path in find_run_folders(tmp_path)] == ["a/deep", "b", "c"]
    assert [*find_run_folders(tmp_path / "b")] == [tmp_path / "b"]
    (tmp_path / "a" / "latest").symlink_to(tmp_path / "b")  # is found first, and there is no other run than `b`
    (tmp_path / "a" / "a").symlink_to("deep")
    assert [*find_run_folders(tmp_path / "c", tmp_path)] == [tmp_path / each for each in ("c", "a/deep", "a/latest")]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder; pass a run folder"):
        list(find_run_folders(tmp_path / "none"))


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"event": "failed", "reason": "no\x1b[31m such"}, "no"),
        ({"event": "failed", "reason": "x" * 900}, "x" * 500),
        ({"event": "done", "reason": "none"}, ""),
        ({"event": "failed", "reason": 5}, ""),
        ([], ""),
    ],
)
def test_the_reason_of_a_failure_is_fit_to_print(tmp_path: Path, found: object, reason: str) -> None:
    (tmp_path / RESULT).write_text(json.dumps(found), encoding="utf-8")
    assert read_failure_reason(tmp_path).startswith(reason)
    assert "\x1b" not in read_failure_reason(tmp_path)
    assert bool(read_failure_reason(tmp_path)) == bool(reason)


def test_a_run_is_at_work_while_its_lock_is_held(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    with (tmp_path / "lock").open("w") as lock:
        assert not is_locked(tmp_path)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_what_was_recorded_of_a_job_is_read_back(tmp_path: Path) -> None:
    assert read_job(tmp_path) is None
    record_job(tmp_path, SubmittedJob(12, 1.5))
    record_job(tmp_path, SubmittedJob(13, 2.5))
    assert read_job(tmp_path) == SubmittedJob(13, 2.5)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"job": "12", "time": 1}', '{"job": 12, "time": -1}', '{"job": 12, "time": 1e300}']
)
def test_what_is_no_record_of_a_job_is_refused_with_its_place(tmp_path: Path, text: str) -> None:
    (tmp_path / JOB).write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"job\.json: cannot be read"):
        read_job(tmp_path)
