"""The shipped plays: the published text, or an error."""

import bz2
from pathlib import Path

import pytest

from lockstep.data.text.shakespeare import shakespeare
from lockstep.errors import TrainingError


def test_the_text_is_the_published_one() -> None:
    text = shakespeare().decode("ascii")
    assert len(text) == 1_115_394
    assert text.startswith("First Citizen:\nBefore we proceed any further, hear me speak.\n")
    assert len(set(text)) == 65


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (bz2.compress(b"To be, or not to be"), "its text has sha256 .*, not 86c4e6aa"),
        (bz2.compress(b"To be, or not to be")[:-4], "ended before the end-of-stream"),
        (b"To be, or not to be", "Invalid data stream"),
    ],
)
def test_another_text_is_refused(tmp_path: Path, content: bytes, found: str) -> None:
    file = tmp_path / "plays.bz2"
    file.write_bytes(content)
    with pytest.raises(TrainingError, match=found):
        shakespeare(file)
