"""scripts/code-lines: what counts as a line of code, and that more than a ceiling is refused."""

from pathlib import Path
from types import ModuleType

import pytest
from component import script

SOURCE = '''"""A module's docstring.

Of three lines."""

from math import (  # 1
    pi,  # 2
)  # 3


# A comment.
class Circle:  # 4
    """A docstring."""

    name = """Not a docstring,
    but two lines of code."""  # 6

    def area(self) -> float:  # 7
        """Another one."""
        "a string that is a statement"  # 8

        return pi  # 9
'''


@pytest.fixture
def counting() -> ModuleType:
    return script("code-lines")


def test_comments_blanks_and_docstrings_are_no_code(counting: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "circle.py").write_text(SOURCE)
    assert counting.lines_of_code(tmp_path / "circle.py") == 9


@pytest.mark.parametrize(("ceiling", "code"), [(9, 0), (8, 1)])
def test_more_than_a_ceiling_is_refused(
    counting: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ceiling: int,
    code: int,
) -> None:
    (tmp_path / "package/room").mkdir(parents=True)
    (tmp_path / "package/room/circle.py").write_text(SOURCE)
    monkeypatch.setattr(counting, "ROOT", tmp_path)
    monkeypatch.setattr(counting, "CEILINGS", {"package": ceiling})
    monkeypatch.setattr("sys.argv", ["code-lines"])
    assert counting.main() == code
    assert f"package: 9 lines of code, {ceiling} allowed" in capsys.readouterr().out
