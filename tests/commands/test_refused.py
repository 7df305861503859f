"""What users get wrong: each command of refused.txt ends with one error and code 2, and has made nothing."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stored
from component import require_package
from conftest import DIGITS, invoke, put
from PIL import Image
from test_sinks import SINK

pytestmark = pytest.mark.slow("runs whole commands")


def _cases() -> Iterator[Any]:
    begin, told = "", []
    for line in Path(__file__).with_name("refused.txt").read_text(encoding="utf-8").splitlines()[3:]:
        if line.startswith("$ lockstep "):
            begin = line.removeprefix("$ lockstep ").replace("$DIGITS", shlex.join(DIGITS))
        elif line.startswith("=> "):
            told.append(line.removeprefix("=> "))
        elif line and not line.startswith("#"):
            told = []
            yield pytest.param(shlex.split(f"{begin} {line}"), told, id=f"{begin[:6]} {line}")


CASES = [*_cases()]


@pytest.fixture
def here(programs: Path, tiny: str) -> Path:
    """Return the test's folder, which is the current one, with the files and programs that the commands name."""
    for name in ("sbatch", "kubectl"):
        put(programs, name, "#!/bin/sh\nexit 1\n")
    (programs / "mine.py").write_text(SINK)
    stored.prices(programs)
    stored.wrong(programs)
    (programs / "held.txt").touch()
    (programs / "empty").mkdir()
    Image.new("L", (8, 8)).save(programs / "one.png")
    (programs / "hosts.txt").write_text("a\nb\n")
    (programs / "empty.txt").write_text("\n# nobody\n")
    (programs / "binary").write_bytes(b"\x7fELF\x93\xff")
    return programs


def test_the_cases_are_found() -> None:
    assert len(CASES) > 190


def files(folder: Path) -> set[Path]:
    """Return all that is below a folder, but the bytecode that Python makes of a module of the user's."""
    return {each for each in folder.rglob("*") if "__pycache__" not in each.parts}


@pytest.mark.parametrize(("words", "told"), CASES)
def test_it_is_told_before_anything_is_made(run, finished, here: Path, words: list[str], told: list[str]) -> None:
    for package in ("mlflow", "wandb"):  # a sink is found before its options are looked at
        if f"name: {package}" in " ".join(words):
            require_package(package)
    if words[0] in ("predict", "report", "watch", "export", "replay", "eval"):
        shutil.copytree(finished().folder / "run", here / "run", symlinks=True)
    before = files(here)
    if words[0] in ("launch", "show", "submit", "watch"):
        done = invoke(*words, code=2)
        out, err = done.stdout, done.stderr
    else:
        env = [word for word in words if re.match("[A-Z_]+=", word)]
        command = run(*(word for word in words if word not in env), code=2, **dict(word.split("=") for word in env))
        out, err = command.out, command.err
        before |= {here / f"{command.name}.out", here / f"{command.name}.err"}
    assert all(line.startswith("preparing ") for line in out.splitlines())  # nothing else is printed
    assert told
    assert all(each in err for each in told), err
    assert len(re.findall(r"^(?:\[rank .*\] )?error: ", err, re.MULTILINE | re.IGNORECASE)) == 1
    assert "Traceback" not in err
    assert files(here) == before
