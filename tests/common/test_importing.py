"""Import paths: what they find, and what is said of those that fail."""

import sys
from pathlib import Path

import pytest

from lockstep.common.importing import import_object
from lockstep.common.names import find_nearest
from lockstep.errors import UsageError

pytestmark = pytest.mark.slow("runs whole commands")


@pytest.fixture
def here(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory of its own, not yet on the path, and none of its modules left behind."""
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return here


def test_returns_the_object() -> None:
    assert import_object("lockstep.common.names:find_nearest", "model") is find_nearest


def test_finds_modules_of_the_current_directory_and_adds_it_once(here: Path) -> None:
    (here / "nets_here.py").write_text("def net(): return 7\ndef other(): return 8\n")
    assert import_object("nets_here:net", "model")() == 7
    assert import_object("nets_here:other", "model")() == 8
    assert sys.path.count(str(here)) == 1
    assert sys.path[0] == str(here)


def test_finds_modules_in_folders_without_init(here: Path) -> None:
    (here / "mine_here").mkdir()
    (here / "mine_here" / "data.py").write_text("value = 3\n")
    assert import_object("mine_here.data:value", "dataset") == 3


@pytest.mark.parametrize("path", ["nets.net", "nets:", ":net", ".nets:net", "nets:a:b", "a b:c", "a/b.py:c"])
def test_refuses_what_is_no_import_path(path: str) -> None:
    with pytest.raises(UsageError) as caught:
        import_object(path, "model")
    assert str(caught.value) == f"model {path}: not an import path; use the form package.module:function"


def test_names_the_package_that_is_missing(here: Path) -> None:
    with pytest.raises(UsageError, match=r"^loss absent_here\.sub:f: module absent_here not found, .*PYTHONPATH"):
        import_object("absent_here.sub:f", "loss")


def test_names_the_module_that_is_missing_in_a_package(here: Path) -> None:
    with pytest.raises(UsageError, match=r"module lockstep\.absent not found,"):
        import_object("lockstep.absent:f", "loss")


def test_suggests_names_near_a_missing_one(here: Path) -> None:
    (here / "near_here.py").write_text("def small_net(): ...\ndef _private(): ...\n")
    with pytest.raises(UsageError, match=r"has no 'smal_net'; did you mean 'small_net'\?$"):
        import_object("near_here:smal_net", "model")
    with pytest.raises(UsageError, match=r"near_here\.py\) has no 'zzz'$"):
        import_object("near_here:zzz", "model")
