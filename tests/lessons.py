"""The lessons of the tutorial: what their pages show, what they need, and what their commands print."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from component import require, require_etcd, require_package, require_slurm

ROOT: Final = Path(__file__).parent.parent
TUTORIAL: Final = ROOT / "tutorial"
LESSONS: Final = sorted(path.parent for path in TUTORIAL.glob("*/README.md"))
TIMEOUT_S: Final = 600
WHOLE_LINES: Final = Path(__file__).parent / "whole_lines"

# A word in the commands of a lesson, and what such a lesson needs that not every machine has.
_NEEDS: Final[dict[str, Callable[[], None]]] = {
    "scripts/with-etcd": require_etcd,
    "scripts/with-slurm": require_slurm,
    "deepspeed": partial(require_package, "deepspeed"),
    "horovod": partial(require_package, "horovod"),
    "mpirun": partial(require, "openmpi", "openmpi-bin", "mpirun", "ompi_info"),
}
# Lessons whose commands other tests run too, and which; that their words are taken is seen by test_tutorial.py.
_HELD: Final = {
    "11-lockstep": "test_coming_from.py has such a loop, by itself and under torchrun",
    "16-zero": "parallel/test_same_bits.py and commands/test_strategies_train.py have its strategies",
    "21-mixed-precision": "commands/test_train.py has bf16, fp16 and O3, config/test_load.py what O1 and O2 are",
    "22-offload-and-recomputation": "commands/test_strategies_train.py has a run that is recomputed",
    "25-elastic": "launchers/test_elastic.py has its agents and their ends",
    "26-etcd": "launchers/test_elastic.py has agents that meet at an etcd",
    "27-slurm": "launchers/test_real.py trains under Slurm, test_submitted.py has what is queued",
    "28-deepspeed": "parallel/test_deepspeed_engine.py and commands/test_deepspeed_train.py have its runs",
    "29-horovod": "strategies/test_horovod.py has its runs",
}
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n?", re.MULTILINE)
_SCRIPT = re.compile(r"\btutorial/[\w/-]+\.py")
_HASH = re.compile(r"\b[0-9a-f]{64}\b")
_MEASURED = re.compile(r" *\b\d+(?:\.\d+)? (ms|s|MB/s)\b")  # times are those of the machine


class Shown(NamedTuple):
    """A command on a page, and the lines that the page shows of what it prints."""

    command: str
    lines: list[str]


def shown(text: str) -> list[Shown]:
    """Return the commands in the console blocks of a page, in their order."""
    found = []
    for block in _CONSOLE.findall(text):
        _, *parts = _COMMAND.split(block)
        found += [Shown(*pair) for pair in zip(parts[::2], (each.splitlines() for each in parts[1::2]), strict=True)]
    return found


def on_top(script: Path) -> list[str]:
    """Return the commands in the comment that a script starts with."""
    comment = re.match(r"(?:#.*\n)*", script.read_text(encoding="utf-8"))
    return _COMMAND.findall(re.sub(r"^# ", "", comment[0], flags=re.MULTILINE))


def comparable(lines: list[str]) -> list[str]:
    """Return lines in an order that does not depend on which rank printed first, without times and hashes."""
    return sorted(_MEASURED.sub(r" # \1", _HASH.sub("sha256", line)).rstrip() for line in lines)


def needs(lesson: Path) -> list[Callable[[], None]]:
    """Return what skips, or fails, a test of the lesson where something that it needs is missing."""
    commands = [command for command, _ in shown((lesson / "README.md").read_text(encoding="utf-8"))]
    return [require for word, require in _NEEDS.items() if any(word in command for command in commands)]


def lessons(*folders: Path) -> list[Any]:
    """Return lessons as parameters of a test, with True for the commands that run our code and False for the others."""
    plain = pytest.mark.slow("none of our code runs in it; it changes with its page, or with a version of torch")
    found = []
    for each in folders:
        kinds = {_runs_ours(command) for command, _ in shown((each / "README.md").read_text(encoding="utf-8"))}
        held = [pytest.mark.slow(_HELD[each.name])] if each.name in _HELD else []
        found += [pytest.param(each, True, id=each.name, marks=held)] * (True in kinds)
        found += [pytest.param(each, False, id=f"{each.name}, not ours", marks=plain)] * (False in kinds)
    return found


def check_what_is_printed(lesson: Path, ours: bool, tmp_path: Path) -> None:
    """Run the commands of a lesson's page that run code of ours, or the others, in a folder of their own.

    What they print is compared with what the page shows.
    """
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("tutorial", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    hashes = set()
    for command, lines in shown((lesson / "README.md").read_text(encoding="utf-8")):
        if _runs_ours(command) is not ours:
            continue
        output = _printed(command, folder, tmp_path / "errors")
        found = f"{command}\n{output}\n{(tmp_path / 'errors').read_text()}"
        assert comparable(output) == comparable(lines), found
        hashes |= set(_HASH.findall("\n".join(output)))
    assert len(hashes) <= 1  # where weights are shown, they are the same under each command


def _runs_ours(command: str) -> bool:
    scripts = [(ROOT / script).read_text(encoding="utf-8") for script in _SCRIPT.findall(command)]
    return bool(re.search(r"\blockstep \w", command)) or any("import lockstep" in script for script in scripts)


def _printed(command: str, folder: Path, errors: Path) -> list[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # in a container
    environment.pop("PYTHONUNBUFFERED", None)
    environment["PYTHONPATH"] = str(WHOLE_LINES)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    line = ["bash", "-o", "pipefail", "-c", command]
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            line, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        ) as process,
    ):
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its workers
            raise
    assert process.returncode == 0, f"{command}\n{output}\n{errors.read_text()}"
    return output.splitlines()
