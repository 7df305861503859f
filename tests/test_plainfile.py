"""Files that have an end are read; links, pipes and devices are refused, and so is what is too large."""

import os
from pathlib import Path

import pytest

from lockstep import plainfile


def test_a_plain_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert plainfile.content(file, 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        plainfile.content(file, 4)


def test_a_link_is_followed_only_where_links_are_expected(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="symbolic link, where a file is expected"):
        plainfile.content(tmp_path / "link", 5)
    with plainfile.reader(tmp_path / "link", links=True) as opened:
        assert opened.read() == b"1"


def test_what_has_no_end_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="it is not a regular file"):
            plainfile.content(path, 5)


def test_a_refusal_leaves_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="regular"):
        plainfile.descriptor(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
