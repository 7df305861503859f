"""The lock keeps others out while it is held, and a killed holder leaves nothing behind."""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lockstep.common.locking import get_private_folder, lock_file
from lockstep.errors import UsageError


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "lock").symlink_to("victim")
    with pytest.raises(OSError, match="symbolic link"), lock_file(tmp_path / "lock"):
        pass
    assert (tmp_path / "victim").read_text() == "mine"


def test_the_private_folder_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = get_private_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert get_private_folder() == folder


@pytest.mark.parametrize("planted", ["link", "file", "open"])
def test_what_another_user_planted_in_its_place_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"lockstep-{os.getuid()}"
    if planted == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to("elsewhere")
    elif planted == "file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(UsageError, match="only you can access"):
        get_private_folder()


def _is_free(path: Path) -> bool:
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_held_inside_and_free_after(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lock"
    with lock_file(path):
        assert not _is_free(path)
    assert _is_free(path)


def test_free_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(ValueError, match="inside"), lock_file(path):
        raise ValueError("inside")
    assert _is_free(path)


def test_a_killed_holder_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import pathlib, sys, time; from lockstep.common.locking import lock_file\n"
        "with lock_file(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert not _is_free(path)
        holder.kill()
    assert _is_free(path)
