"""docs/coming-from.md: its two scripts do the same, and every name on it exists, theirs and ours."""

import inspect
import os
import re
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from sections import DOCS

from lockstep.config.schema import Config
from lockstep.loop.run import Run
from lockstep.loop.step import Step

pytestmark = pytest.mark.slow("runs whole commands")

# What follows is about configurations and has tests of its own.
PAGE = (DOCS / "coming-from.md").read_text(encoding="utf-8").partition("\n## Import a configuration\n")[0]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| (?!-)([^|]*) \| ([^|]*) \|", re.MULTILINE)
_NAME = re.compile(r"`(\w+(?:\.\w+)+)(?:\((\w+)=\))?`")
THEIRS = pytest.mark.slow("none of our code runs in it; it changes with the page, or with a version of theirs")
OTHERS = ("accelerate", "lightning", "transformers")


def scripts() -> dict[str, str]:
    """Return the page's code by the file name in its first line."""
    blocks = [(kind, code) for kind, code in _BLOCK.findall(PAGE)]
    assert {kind for kind, _ in blocks} == {"python"}
    return {code.partition("\n")[0].removeprefix("# "): code for _, code in blocks}


def names(column: int) -> list[tuple[str, str]]:
    """Return the dotted names in a column of the tables, each with the parameter it is said to have, or ""."""
    return [found for row in _ROW.findall(PAGE) for found in _NAME.findall(row[column])]


def run(folder: Path, name: str, processes: int) -> str:
    """Run a script of the page on so many processes and return what it prints."""
    (folder / name).write_text(scripts()[name], encoding="utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(torchrun if processes > 1 else []), name]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def accuracy(printed: str) -> float:
    return float(re.findall(r"accuracy (\S+)", printed)[-1])


@pytest.mark.worlds
def test_the_script_after_learns_the_same_on_any_number_of_processes(tmp_path: Path) -> None:
    assert scripts().keys() == {"before.py", "after.py"}
    after = run(tmp_path, "after.py", 1)
    assert accuracy(after) > 0.9
    (tmp_path / "two").mkdir()
    assert hash_of(run(tmp_path / "two", "after.py", 2)) == hash_of(after)


@pytest.mark.worlds
@THEIRS
def test_the_script_before_learns_as_well(tmp_path: Path) -> None:
    assert accuracy(run(tmp_path, "before.py", 2)) > 0.9


def hash_of(printed: str) -> str:
    last = printed.splitlines()[-1]
    assert re.fullmatch(r"weights sha256 [0-9a-f]{64}", last)
    return last


def test_the_page_has_tables_of_each() -> None:
    """Otherwise the tests below would look at nothing."""
    assert {name.partition(".")[0] for name, _ in names(0)} >= set(OTHERS)
    assert {name.partition(".")[0] for name, _ in names(1)} == {"lockstep", "run", "step", "recipe", "placement"}


@THEIRS
@pytest.mark.parametrize("package", OTHERS)
def test_what_others_are_said_to_have_they_have(package: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        pytest.importorskip(package)
        wrong = [found for found in names(0) if found[0].startswith(f"{package}.") and not _exists(*found)]
    assert not wrong


def _exists(name: str, parameter: str) -> bool:
    thing: Any = import_module(name.partition(".")[0])
    for number, part in enumerate(name.split(".")[1:], start=2):
        try:
            thing = getattr(thing, part)
        except AttributeError:
            try:
                thing = import_module(".".join(name.split(".")[:number]))
            except ImportError:
                return False
    return not parameter or parameter in inspect.signature(thing).parameters


def test_what_ours_is_said_to_be_there_is() -> None:
    wrong = [name for name, _ in names(1) if not _is_ours(*name.split("."))]
    assert not wrong


def _is_ours(first: str, second: str) -> bool:
    section = Config.model_fields.get(first)
    if section is not None and second in getattr(section.annotation, "model_fields", {}):
        return True
    return second in dir({"run": Run, "step": Step, "lockstep": import_module("lockstep")}.get(first))
