"""Where the secret of a job comes from, and what is refused as one."""

import os
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.ranks.secret import generate_secret, read_job_secret


def test_a_secret_is_drawn_anew_each_time() -> None:
    assert len({generate_secret() for _ in range(3)}) == 3
    assert read_job_secret({"LOCKSTEP_JOB_SECRET": generate_secret()})


def test_it_is_in_the_environment_or_in_a_file_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert read_job_secret({}) == b""
    assert read_job_secret({"LOCKSTEP_JOB_SECRET_FILE": str(file)}) == b"0123456789abcdef"
    assert read_job_secret({"LOCKSTEP_JOB_SECRET": "x" * 16, "LOCKSTEP_JOB_SECRET_FILE": str(file)}) == b"x" * 16


@pytest.mark.parametrize("secret", ["", "short", "x" * 5000])
def test_a_secret_that_can_be_guessed_or_is_none_is_refused(tmp_path: Path, secret: str) -> None:
    file = tmp_path / "secret"
    file.write_text(secret)
    file.chmod(0o600)
    for env in ({"LOCKSTEP_JOB_SECRET": secret}, {"LOCKSTEP_JOB_SECRET_FILE": str(file)}):
        with pytest.raises(UsageError, match=r"LOCKSTEP_JOB_SECRET.*: expected 16 to 4096 bytes, got "):
            read_job_secret(env)


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef")
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(
            UsageError, match="must be a file that you own and only you can access; create a secret with "
        ):
            read_job_secret({"LOCKSTEP_JOB_SECRET_FILE": str(file)})


def test_a_file_that_is_none_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("fifo", "missing", "."):
        with pytest.raises(UsageError, match="LOCKSTEP_JOB_SECRET_FILE "):
            read_job_secret({"LOCKSTEP_JOB_SECRET_FILE": str(tmp_path / name)})
