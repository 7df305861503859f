"""The shipped plays: an error where they are not the published text, of which test_text_files.py has the sizes."""

import bz2
from pathlib import Path

import pytest

from lockstep.data.text.shakespeare import load_shakespeare
from lockstep.errors import TrainingError


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (bz2.compress(b"To be, or not to be"), "expected a text with sha256 86c4e6aa.*, got "),
        (bz2.compress(b"To be, or not to be")[:-4], "ended before the end-of-stream"),
        (b"To be, or not to be", "Invalid data stream"),
    ],
)
def test_another_text_is_refused(tmp_path: Path, content: bytes, found: str) -> None:
    file = tmp_path / "plays.bz2"
    file.write_bytes(content)
    with pytest.raises(TrainingError, match=found):
        load_shakespeare(file)
