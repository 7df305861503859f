"""The seconds of test files, by their names: measured, written and read."""

import json
from pathlib import Path

from durations import TABLE, by_folder, seconds_of_files, summary


def test_folders_are_summed_the_longest_first() -> None:
    seconds = {"core/test_a.py": 1.0, "parallel/layouts/test_b.py": 2.0, "parallel/test_c.py": 3.0, "test_d.py": 0.5}
    found = by_folder({Path(name): taken for name, taken in seconds.items()})
    assert [*found.items()] == [("parallel", 5.0), ("core", 1.0), (".", 0.5)]


def test_a_table_has_what_was_measured_and_where() -> None:
    found = summary({"test_a.py": 1.04, "test_b.py": 40.46}, {"passed": 2, "failed": 0}, 90.0)
    assert len(found.pop("commit")) == 40
    assert found.pop("versions").keys() == {"python", "torch", "torchvision"}
    assert len(found.pop("date")) == 10
    assert found == {"minutes": 1.5, "passed": 2, "failed": 0, "seconds": {"test_b.py": 40.5, "test_a.py": 1.0}}


def test_a_table_is_read_and_need_not_be_there(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(json.dumps(summary({"test_a.py": 7.0}, {}, 1.0)), encoding="utf-8")
    assert seconds_of_files(tmp_path / "table.json") == {"test_a.py": 7.0}
    assert seconds_of_files(tmp_path / "none") == {}
    assert all(seconds > 0 for seconds in seconds_of_files(TABLE).values())
