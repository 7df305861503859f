"""Other systems, pretended: what is missing there is taken away from this one before Lockstep is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("runs whole commands")

# macOS has none of these. torch and the standard library are imported first, as theirs is another matter.
MACOS = """
import ctypes, fcntl, os, signal, sys
import torch, torchvision
for module, names in {
    os: "sched_getaffinity sched_setaffinity pidfd_open memfd_create posix_fallocate",
    signal: "pidfd_send_signal",
    fcntl: "F_SETPIPE_SZ",
}.items():
    for name in names.split():
        delattr(module, name)

class NoPrctl:
    def __init__(self, *_, **__): pass
    def __getattr__(self, name): raise AttributeError(name)

ctypes.CDLL = NoPrctl
"""
# Windows has none of these modules either.
WINDOWS = """
import importlib.util, os, signal, sys
import psutil  # which itself looks for `resource` on this system
for name in ("fcntl", "resource"):
    sys.modules[name] = None
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("fcntl", "resource") else find_spec(name, *rest)
for module, names in {os: "getuid geteuid setpgid fork killpg", signal: "SIGHUP SIGUSR1 SIGKILL SIGQUIT"}.items():
    for name in names.split():
        delattr(module, name)
"""
MAIN = "\nfrom lockstep.cli import main; main()"


def run(folder: Path, system: str, *words: str, body: str = MAIN) -> "subprocess.CompletedProcess[str]":
    """Run a command of Lockstep, or `body`, on a system that is pretended."""
    line = [sys.executable, "-c", system + body, *words]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow("2 processes do more of it")), 2])
def test_macos_trains(tmp_path: Path, processes: int) -> None:
    words = ("recipe.epochs=", "recipe.steps=3", f"placement.processes={processes}", "run.dir=a")
    found = run(tmp_path, MACOS, "train", "digits", *words)
    assert (found.returncode, "weights sha256 " in found.stdout) == (0, True), found.stderr
    assert "Traceback" not in found.stderr


def test_macos_names_the_rank_that_failed(tmp_path: Path) -> None:
    body = """
import os, sys
from lockstep.config.placement import Placement
from lockstep.run.start import run_on_ranks

def work(_, rendezvous):
    if rendezvous.info.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return len(rendezvous.broadcast_text())

sys.exit(run_on_ranks(work, None, Placement(), 3))
"""
    found = run(tmp_path, MACOS, body=body)
    assert found.returncode == 1
    assert found.stderr.startswith("[rank 1 of 3, ")
    assert "] error: was killed by SIGKILL" in found.stderr
    assert found.stderr.count("[rank ") == 1


def test_windows_shows_and_refuses_the_rest_in_a_line(tmp_path: Path) -> None:
    body = """
from click.testing import CliRunner
from lockstep.cli import main
for command in sys.argv[1:]:
    done = CliRunner().invoke(main, command.split())
    print(done.exit_code, done.stderr.strip())
"""
    shows = ("--help", "show digits", "recipes", "strategies")
    refused = ("train", "eval", "verify", "launch", "submit", "jobs", "doctor")
    found = run(tmp_path, WINDOWS, *shows, *refused, body=body)
    assert (found.returncode, found.stderr) == (0, "")
    lines = found.stdout.splitlines()
    assert [line.strip() for line in lines[: len(shows)]] == ["0"] * len(shows)
    for command, line in zip(refused, lines[len(shows) :], strict=True):
        assert line.startswith(f"2 error: lockstep {command} requires Linux or macOS, ")


def test_windows_refuses_the_library_in_a_line(tmp_path: Path) -> None:
    body = """
import lockstep
for name in lockstep.__all__:
    try:
        getattr(lockstep, name)
    except lockstep.UsageError as error:
        print(error)
"""
    found = run(tmp_path, WINDOWS, body=body)
    assert found.stderr == ""
    refused = found.stdout.splitlines()
    assert all(" requires Linux or macOS, " in line for line in refused)
    named = {line.split()[0] for line in refused}
    assert {"lockstep.join", "lockstep.train", "lockstep.load"} <= named
    assert named.isdisjoint({"lockstep.Recipe", "lockstep.Placement", "lockstep.UsageError", "lockstep.Stepped"})


def test_without_prctl_a_child_ends_soon_after_its_parent() -> None:
    parent = """
import os, sys, time
if os.fork():
    time.sleep(1)
    os._exit(0)
from lockstep.common.follow_parent import die_with_parent
die_with_parent()
time.sleep(60)
"""
    # The child has the pipe: it is closed once both have ended.
    found = subprocess.run([sys.executable, "-c", MACOS + parent], capture_output=True)
    assert found.returncode == 0
