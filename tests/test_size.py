"""scripts/size: what counts as a token of code, and the report by folder."""

import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from component import script

SOURCE = b'''"""A module's docstring.

Of three lines."""

from math import pi  # four tokens


# A comment.
class Circle:
    """A docstring."""

    def area(self) -> float:
        """Another one."""
        return pi
'''


@pytest.fixture
def size() -> ModuleType:
    return script("size")


def test_comments_blanks_and_docstrings_are_not_counted(size: ModuleType) -> None:
    imports, header, signature, body = 4, 3, 8, 2
    assert size.count_tokens(SOURCE) == imports + header + signature + body


def test_the_report_compares_the_working_tree_with_a_commit(
    size: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "package/room").mkdir(parents=True)
    file = tmp_path / "package/room/circle.py"
    file.write_bytes(b"pi = 3\n")
    author = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
    for arguments in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    file.write_bytes(SOURCE)
    monkeypatch.setattr(size, "ROOT", tmp_path)
    monkeypatch.setattr(size, "FOLDERS", ("package",))
    monkeypatch.setattr("sys.argv", ["size"])
    size.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("package: 17 tokens, +14 since ")
    assert lines[1].split() == ["17", "+14", "package/room"]


def test_modules_without_a_test_file_of_their_own_are_listed(
    size: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("src/lockstep/a/b.py", "src/lockstep/a/c.py", "src/lockstep/a/d.py", "src/lockstep/a/__init__.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    for path in ("tests/a/test_b.py", "tests/a/test_a_c.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    monkeypatch.setattr(size, "ROOT", tmp_path)
    assert size.modules_without_tests() == ["a/d.py"]
