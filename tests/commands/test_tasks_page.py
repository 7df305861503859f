"""The page's task of one's own, in the file that it names, trains: on two ranks to the bits of one."""

import re
import shlex
from pathlib import Path

import pytest
from forked import events
from sections import section

PAGE = section("models.md", "Tasks")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ lockstep (train .*)$", re.MULTILINE)


def test_the_task_of_the_page_trains_to_one_hash(run, tmp_path: Path) -> None:
    (code,), (command,) = BLOCK.findall(PAGE), COMMAND.findall(PAGE)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "tasks.py").write_text(code, encoding="utf-8")
    one = run(*shlex.split(command), "placement.processes=1")
    two = run(*shlex.split(command), "placement.processes=2", "run.dir=runs/two")
    assert one.sha256 == two.sha256
    (first,), (second,) = (events(tmp_path / "runs" / name, "evaluated") for name in ("wrong", "two"))
    assert first["wrong"] == second["wrong"] == pytest.approx(round(first["wrong"] * first["of"]) / first["of"])
    assert 0 < first["wrong"] < 1
    assert (first["loss"], first["fractions"]) == (second["loss"], ["wrong"])
    assert events(tmp_path / "runs" / "wrong", "done")[0]["best_wrong"] == first["wrong"]
