"""A child ends with its parent, however that ends."""

import os
import signal
import subprocess
import sys
import time

import pytest
from waiting import ended

# A parent that starts a child, by os.fork or by multiprocessing, and says its number once it is tied.
PARENT = """
import multiprocessing, os, sys, time
from lockstep.parent import die_with_parent

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
    assert parent.stdout is not None
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
from lockstep.parent import die_with_parent

def child():
    while os.getppid() == multiprocessing.parent_process().pid:
        time.sleep(0.001)
    die_with_parent()
    print("alive", flush=True)

multiprocessing.get_context("fork").Process(target=child).start()
os._exit(0)
"""
    found = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=20)
    assert found.stdout == ""
