"""A test that is alone waits for those that run, and those that come later wait for it."""

import os
from pathlib import Path

import pytest
from admission import admitted
from waiting import until


def test_one_that_is_alone_has_nobody_beside_it_and_is_not_overtaken(tmp_path: Path) -> None:
    order = tmp_path / "order"

    def enter(name: str, *, alone: bool) -> int:
        if pid := os.fork():
            return pid
        with admitted(tmp_path, alone=alone), order.open("a") as file:
            file.write(name)
        os._exit(0)

    with admitted(tmp_path, alone=False), admitted(tmp_path, alone=False):
        order.write_text("ab")
        first = enter("1", alone=True)
        until(lambda: _waits(first), 10)
        second = enter("2", alone=False)
        until(lambda: _waits(second), 10)
        assert order.read_text() == "ab"
    for pid in (first, second):
        os.waitpid(pid, 0)
    assert order.read_text() == "ab12"


def test_a_lock_ends_with_the_test_although_what_it_forked_goes_on(tmp_path: Path) -> None:
    with admitted(tmp_path, alone=False):
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    with admitted(tmp_path, alone=True):
        os.close(writing)
        os.waitpid(pid, 0)
    os.close(reading)


def test_a_test_that_fails_leaves_the_queue(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), admitted(tmp_path, alone=True):
        print(1 / 0)
    with admitted(tmp_path, alone=True):
        pass


def _waits(pid: int) -> bool:
    return "flock" in Path(f"/proc/{pid}/wchan").read_text() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "S"
