"""The first request to stop is kept for a step boundary; a second Ctrl-C ends at once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from lockstep.common.interrupts import DUPLICATES_S, InterruptCount
from lockstep.errors import EXIT_INTERRUPTED, EXIT_SAVED
from lockstep.ranks.signals import EXIT_CODES, STOP_LEVELS, StopRequest, get_stop_signals

TRAINER = """
import time
from lockstep.common.follow_parent import die_with_parent
from lockstep.ranks.signals import StopRequest
die_with_parent()
stop = StopRequest()
print("ready", flush=True)
before = 0
while True:
    level = stop.level
    if level != before:
        print(f"level {level}", flush=True)
    before = level
    time.sleep(0.001)
"""


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in get_stop_signals()}
    yield StopRequest()
    for number, action in before.items():
        signal.signal(number, action)


@pytest.mark.parametrize(
    ("numbers", "level"),
    [
        ([], 0),
        ([signal.SIGUSR1], 1),
        ([signal.SIGUSR1, signal.SIGUSR1], 1),
        ([signal.SIGHUP], 2),
        ([signal.SIGTERM], 3),
        ([signal.SIGTERM, signal.SIGUSR1], 3),
        ([signal.SIGTERM, signal.SIGTERM], 3),
        ([signal.SIGINT], 4),
        ([signal.SIGTERM, signal.SIGINT], 4),
        ([signal.SIGINT, signal.SIGTERM], 4),  # somebody at the terminal wins
    ],
)
def test_the_highest_level_is_kept(stop: StopRequest, numbers: list[signal.Signals], level: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)
    assert stop.level == level


def test_wishes_have_names_and_exit_codes() -> None:
    assert {STOP_LEVELS[level]: EXIT_CODES[STOP_LEVELS[level]] for level in (1, 2, 3, 4)} == {
        "SIGUSR1": EXIT_SAVED,
        "SIGHUP": EXIT_SAVED,
        "SIGTERM": EXIT_SAVED,
        "SIGINT": EXIT_INTERRUPTED,
    }


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """As nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in get_stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.SIGHUP in get_stop_signals()


@pytest.fixture
def trainer() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def test_a_second_interrupt_ends_at_once(trainer: "subprocess.Popen[str]") -> None:
    assert trainer.stdout.readline() == "ready\n"
    trainer.send_signal(signal.SIGTERM)
    assert trainer.stdout.readline() == "level 3\n"
    trainer.send_signal(signal.SIGINT)
    assert trainer.stdout.readline() == "level 4\n"
    time.sleep(DUPLICATES_S)
    assert trainer.poll() is None
    trainer.send_signal(signal.SIGINT)
    assert trainer.wait(60) == EXIT_INTERRUPTED


def test_copies_of_an_interrupt_are_no_second_interrupt(stop: StopRequest) -> None:
    """As a worker of mp.spawn gets them: one from the kernel for each thread of the parent that died."""
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.level == 4  # and this process is alive


def test_an_interrupt_is_the_second_when_it_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    interrupts = InterruptCount()
    assert not interrupts.is_second()
    now[0] += DUPLICATES_S
    assert not interrupts.is_second()
    now[0] += 0.01
    assert interrupts.is_second()


def test_what_another_has_taken_since_is_left_to_it() -> None:
    before = [signal.getsignal(number) for number in get_stop_signals()]
    first = StopRequest()
    second = StopRequest()
    own = [signal.getsignal(number) for number in get_stop_signals()]
    first.release()
    assert [signal.getsignal(number) for number in get_stop_signals()] == own
    second.release()
    for number, action in zip(get_stop_signals(), before, strict=True):
        signal.signal(number, action)
