"""The job of a run folder: what was recorded is read back, and nothing else is taken for it."""

from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.run.submitted import RECORD, Submitted, record, recorded


def test_what_was_recorded_is_read_back(tmp_path: Path) -> None:
    assert recorded(tmp_path) is None
    record(tmp_path, Submitted(12, 1.5))
    record(tmp_path, Submitted(13, 2.5))
    assert recorded(tmp_path) == Submitted(13, 2.5)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"job": "12", "time": 1}', '{"job": 12, "time": -1}', '{"job": 12, "time": 1e300}']
)
def test_what_is_no_record_is_refused_with_its_place(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD).write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"job\.json: cannot be read"):
        recorded(tmp_path)
