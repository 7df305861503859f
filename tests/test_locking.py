"""The lock keeps others out while it is held, and a killed holder leaves nothing behind."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.locking import exclusive


def _is_free(path: Path) -> bool:
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_held_inside_and_free_after(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lock"
    with exclusive(path):
        assert not _is_free(path)
    assert _is_free(path)


def test_free_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(ValueError, match="inside"), exclusive(path):
        raise ValueError("inside")
    assert _is_free(path)


def test_a_killed_holder_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import pathlib, sys, time; from lockstep.locking import exclusive\n"
        "with exclusive(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert not _is_free(path)
        holder.kill()
    assert _is_free(path)
