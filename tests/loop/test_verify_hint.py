"""An own loop's first run on several ranks says how to verify it."""

import json
from pathlib import Path

import pytest

from lockstep.loop.verify_hint import make_verify_hint
from lockstep.reporting.jsonl import EVENTS


def test_the_first_run_on_several_ranks_names_the_command_with_the_scripts_arguments(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        hint = make_verify_hint(2, folder, ["train.py", "--name", "a b"])
        assert hint.endswith("lockstep verify train.py --name 'a b'")
        assert "on 2 ranks" in hint
        assert "\n" not in hint


@pytest.mark.parametrize(("size", "argv"), [(1, ["train.py"]), (2, ["-c"]), (2, ["/usr/bin/pytest"]), (2, [])])
def test_one_rank_and_what_is_no_script_say_nothing(size: int, argv: list[str]) -> None:
    assert make_verify_hint(size, None, argv) == ""


def test_a_later_run_in_the_same_folder_says_nothing(tmp_path: Path) -> None:
    (tmp_path / EVENTS).write_text(json.dumps({"event": "started"}) + "\n")
    assert make_verify_hint(2, tmp_path, ["train.py"]) == ""


def test_a_process_of_lockstep_launch_is_told_and_one_that_the_script_started_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("multiprocessing.parent_process", lambda: "a process")
    assert make_verify_hint(2, None, ["train.py"]) == ""
    assert make_verify_hint(2, None, ["train.py"], started_by_launch=True).endswith("lockstep verify train.py")
