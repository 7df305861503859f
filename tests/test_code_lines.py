"""scripts/code-lines: what counts as a line of code, and that more than a ceiling is refused."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts/code-lines"
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
def script() -> ModuleType:
    loader = SourceFileLoader("code_lines", str(SCRIPT))
    spec = spec_from_loader("code_lines", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_comments_blanks_and_docstrings_are_no_code(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "circle.py").write_text(SOURCE)
    assert script.lines_of_code(tmp_path / "circle.py") == 9


@pytest.mark.parametrize(("ceiling", "code"), [(9, 0), (8, 1)])
def test_more_than_a_ceiling_is_refused(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ceiling: int,
    code: int,
) -> None:
    (tmp_path / "package/room").mkdir(parents=True)
    (tmp_path / "package/room/circle.py").write_text(SOURCE)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "CEILINGS", {"package": ceiling})
    monkeypatch.setattr("sys.argv", ["code-lines"])
    assert script.main() == code
    assert f"package: 9 lines of code, {ceiling} allowed" in capsys.readouterr().out
