"""Files that have an end are read; links, pipes, devices, what is too large and what is no JSON are refused."""

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from lockstep.common import plainfile


def test_a_plain_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert plainfile.read_bytes(file, 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        plainfile.read_bytes(file, 4)


def test_a_link_is_followed_only_where_links_are_expected(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="symbolic link, expected a regular file"):
        plainfile.read_bytes(tmp_path / "link", 5)
    with plainfile.open_reader(tmp_path / "link", links=True) as opened:
        assert opened.read() == b"1"


def test_what_has_no_end_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="it is not a regular file"):
            plainfile.read_bytes(path, 5)


def test_a_refusal_leaves_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="regular"):
        plainfile.open_descriptor(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_json_that_is_nested_too_deeply_is_none() -> None:
    assert plainfile.parse_json(b'{"a": [1]}') == {"a": [1]}
    for text in ("[" * 100_000, "{", b"\xff", "9" * 5000):
        with pytest.raises(ValueError, match=r"nested|Expecting|decode|limit"):
            plainfile.parse_json(text)


def test_a_folder_for_a_library_has_plain_files_alone(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below/file").write_bytes(b"1")
    (tmp_path / "link").symlink_to("below/file")
    (tmp_path / "dangling").symlink_to("nowhere")  # a library says that itself
    plainfile.check_folder(tmp_path)
    os.mkfifo(tmp_path / "below/pipe")
    with pytest.raises(OSError, match="below/pipe is not a regular file"):
        plainfile.check_folder(tmp_path)


def test_a_header_of_tensors_has_a_length_that_can_be(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for length, refused in ((plainfile.MAX_HEADER_BYTES, False), (plainfile.MAX_HEADER_BYTES + 1, True)):
        file.write_bytes(length.to_bytes(8, "little"))
        with pytest.raises(OSError, match="its header has") if refused else nullcontext():
            plainfile.check_safetensors(file)
