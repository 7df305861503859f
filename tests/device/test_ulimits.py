"""What the system refused is named with the limit, wherever in a chain of errors it stands."""

import errno
import os

import pytest

from lockstep.device.ulimits import find_open_files_error, make_limit_error


@pytest.mark.parametrize(
    ("number", "why"), [(errno.EAGAIN, "ulimit -u"), (errno.EMFILE, "ulimit -n"), (errno.ENOMEM, "out of memory")]
)
def test_a_known_refusal_has_its_limit(number: int, why: str) -> None:
    text = str(make_limit_error("start rank 1", OSError(number, os.strerror(number))))
    assert text.startswith(f"cannot start rank 1: {os.strerror(number)}: ")
    assert why in text
    assert text.endswith("start fewer processes (placement.processes)")


def test_of_another_no_limit_is_named() -> None:
    assert "the limits are" not in str(make_limit_error("start rank 1", OSError(errno.EACCES, "Permission denied")))


def test_what_only_sounds_like_too_many_open_files_is_none() -> None:
    assert find_open_files_error(ValueError(os.strerror(errno.EMFILE))) is None  # a user's text
    assert find_open_files_error(OSError(errno.ENOENT, "No such file")) is None
