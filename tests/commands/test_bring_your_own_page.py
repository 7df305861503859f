"""The page's examples, put into one file as it says, train: on two ranks to the bits of one."""

import json
import re
import shlex
from pathlib import Path

from forked import events

PAGE = Path(__file__).parents[2] / "docs" / "bring-your-own.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ lockstep (train .*)$", re.MULTILINE)


def test_the_examples_train_to_one_hash(run, tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text("\n\n".join(BLOCK.findall(text)), encoding="utf-8")
    commands = COMMAND.findall(text)
    assert len(commands) == 2
    trained = [run(*shlex.split(command)) for command in commands]
    assert trained[0].sha256 == trained[1].sha256
    figures = [events(tmp_path / name, "evaluated")[0] for name in ("one", "two")]
    assert figures[0]["brier"] == figures[1]["brier"] > 0
    assert figures[0]["sure"] == figures[1]["sure"]
    source = json.loads((tmp_path / "two/environment.json").read_text())["source"]
    assert list(source) == ["mine.py"]
    assert trained[1].err == ""
    assert float((tmp_path / "two/best.txt").read_text().rstrip("%\n")) > 0
