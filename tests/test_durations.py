"""Groups of tests, their seconds, and those that have grown."""

from pathlib import Path

import pytest
from durations import group, groups_of, grown, slow_of, summary


@pytest.mark.parametrize(
    ("file", "keywords", "expected"),
    [
        ("commands/test_eval.py", ["commands", "test_eval.py"], "commands commands"),
        ("parallel/layouts/test_rows.py", ["worlds", "quick", "parallel"], "parallel worlds"),
        ("test_cli.py", ["commands"], ". commands"),
        ("benchmarks/test_pipelines.py", ["real", "worlds"], "benchmarks real"),
    ],
)
def test_a_group_is_a_folder_and_a_tier(file: str, keywords: list[str], expected: str) -> None:
    assert group(Path(file), dict.fromkeys(keywords)) == expected


def test_groups_that_grew_are_named_on_a_machine_of_any_speed() -> None:
    before = {"a": 100.0, "b": 200.0, "c": 50.0, "small": 1.0}
    assert list(grown(before, before)) == []
    assert list(grown({name: 2 * seconds for name, seconds in before.items()}, before)) == []
    [line] = grown({"a": 130.0, "b": 200.0, "c": 50.0, "small": 5.0}, before)
    assert line == "a: 130 s, expected 100; make it cheaper, or run scripts/test --write"
    [line] = grown({"a": 200.0, "b": 520.0, "c": 100.0}, before)
    assert line.startswith("b: 520 s, expected 400;")
    [line] = grown({**before, "new": 20.0}, before)
    assert line.startswith("new: 20 s, expected 0;")


def test_a_table_has_what_was_measured_and_where(tmp_path: Path) -> None:
    found = summary({"core pure": 3.14159}, {"core/a.py": 1.0, "core/b.py": 40.4}, {"passed": 2, "failed": 0}, 90.0)
    assert len(found.pop("commit")) == 40
    assert found.pop("versions").keys() == {"python", "torch", "torchvision"}
    assert len(found.pop("date")) == 10
    assert found == {"minutes": 1.5, "passed": 2, "failed": 0, "groups": {"core pure": 3.1}, "slow": {"core/b.py": 40}}


def test_without_a_table_nothing_is_known(tmp_path: Path) -> None:
    assert (groups_of(tmp_path / "none"), slow_of(tmp_path / "none")) == ({}, {})
