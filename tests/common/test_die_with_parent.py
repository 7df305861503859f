"""A child ends with its parent, however that ends."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from waiting import ended

from lockstep.common import follow_parent
from lockstep.errors import TrainingError

pytestmark = pytest.mark.slow("runs whole commands")

# A parent that starts a child, by os.fork or by multiprocessing, and says its number once it is tied.
PARENT = """
import multiprocessing, os, sys, time
from lockstep.common.follow_parent import die_with_parent

def child():
    if "tied" in sys.argv:
        die_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(60)

if "multiprocessing" in sys.argv:
    multiprocessing.get_context("fork").Process(target=child).start()
elif not os.fork():
    child()
time.sleep(60)
"""


def _start(*words: str) -> tuple["subprocess.Popen[str]", int]:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *words], stdout=subprocess.PIPE, text=True)
    return parent, int(parent.stdout.readline())


def _ends(pid: int, within: float) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if ended(pid):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("how", ["fork", "multiprocessing"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_that_is_tied_ends_with_its_parent(how: str, number: signal.Signals) -> None:
    parent, child = _start("tied", how)
    with parent:
        assert not _ends(child, 0.05)
        parent.send_signal(number)
    assert _ends(child, 10)


def test_a_child_that_is_not_tied_goes_on() -> None:
    """Otherwise the test above would hold without the code."""
    parent, child = _start("loose", "fork")
    with parent:
        parent.kill()
    try:
        assert not _ends(child, 0.2)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    """The parent dies between the fork and the call."""
    script = """
import multiprocessing, os, time
from lockstep.common.follow_parent import die_with_parent

def child():
    while os.getppid() == multiprocessing.parent_process().pid:
        time.sleep(0.001)
    die_with_parent()
    print("alive", flush=True)

multiprocessing.get_context("fork").Process(target=child).start()
os._exit(0)
"""
    found = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert found.stdout == ""


@pytest.mark.parametrize(
    ("launcher", "first", "read", "gone"),
    [
        ("torchrun", ["/sbin/init"], True, True),
        ("torchrun", [], True, True),  # not ours to see
        ("torchrun", ["/usr/bin/python3", "/usr/bin/torchrun", "-m", "lockstep"], True, False),  # in a container
        ("torchrun", ["/usr/bin/python3", "supervise.py"], True, True),  # which had started torchrun
        ("mpich", ["/run/podman-init"], True, False),
        ("openmpi", ["/sbin/init"], False, True),
        ("environment", ["/sbin/init"], False, False),  # by hand, with nohup
    ],
)
def test_a_child_of_process_1_has_lost_its_launcher_unless_it_is_that(
    monkeypatch: pytest.MonkeyPatch, launcher: str, first: list[str], read: bool, gone: bool
) -> None:
    tied = []
    monkeypatch.setattr(follow_parent, "die_with_parent", lambda: tied.append(True))
    monkeypatch.setattr(follow_parent, "read_parent_command", lambda: first)
    monkeypatch.setattr(follow_parent, "_is_reader_gone", lambda _: not read)
    monkeypatch.setattr(follow_parent, "_has_torch", lambda pid: pid == 1 and first[1:] != ["supervise.py"])
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(TrainingError, match="is gone") if gone else nullcontext():
        follow_parent.die_with_launcher(launcher)
    assert bool(tied) == (launcher != "environment")


def test_a_process_that_has_torch_is_known_by_its_libraries() -> None:
    assert follow_parent._has_torch(os.getpid())  # by the conftest
    with subprocess.Popen(["sleep", "60"]) as other:
        assert not follow_parent._has_torch(other.pid)
        other.kill()
    assert follow_parent._has_torch(2**22 + 1)  # which nobody sees


def test_nobody_reads_what_goes_into_a_pipe_or_a_terminal_that_is_closed() -> None:
    for reader, writer in (os.pipe(), os.openpty()):
        assert not follow_parent._is_reader_gone(writer)
        os.close(reader)
        assert follow_parent._is_reader_gone(writer)
        os.close(writer)
    with open(os.devnull, "w") as nowhere:
        assert not follow_parent._is_reader_gone(nowhere.fileno())


@pytest.mark.parametrize("words", [("train", "digits"), ("eval", "run")])
def test_a_rank_ends_with_its_launcher_also_while_it_imports(tmp_path: Path, words: tuple[str, ...]) -> None:
    script = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "lockstep", *sys.argv[1:]])
while "libtorch" not in open(f"/proc/{child.pid}/maps").read():
    time.sleep(0.002)
print(child.pid, flush=True)
time.sleep(60)
"""
    rank = {"TORCHELASTIC_RUN_ID": "it", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    env = {**os.environ, **rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    line = [sys.executable, "-c", script, *words]
    with subprocess.Popen(line, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as launcher:
        child = int(launcher.stdout.readline())
        launcher.kill()
    assert _ends(child, 0.5)
