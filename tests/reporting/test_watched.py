"""A watched run in words, and when it is over and with which exit code."""

import pytest
from event_examples import SHA, done, stopped
from watched_examples import GOING, watched

from lockstep.reporting.status import State
from lockstep.reporting.watched import ending, exit_code, figures, headline, is_over, left, line, place, told


def test_a_run_that_goes_on_in_words() -> None:
    run = watched(*GOING)
    assert headline(run) == "runs/a  running  single on 1, cpu"
    assert place(run) == "epoch 3/30  step 69/690"
    assert left(run).endswith(" left")
    assert figures(run).startswith(
        "88 samples/s  loss/train 0.4321  loss/validation 0.1023  top1 98.61 %  top5 100.00 %"
    )
    assert line(run) == f"runs/a  {place(run)}  {figures(run)}  {left(run)}"


def test_before_its_log_there_is_a_name() -> None:
    run = watched(name="runs/\x1b[2Jx")
    assert (headline(run), place(run), left(run), figures(run)) == (r"runs/\x1b[2Jx  running", "", "", "")


@pytest.mark.parametrize(
    ("state", "over", "waiting_over"),
    [
        ("running", False, False),
        ("queued", False, False),
        ("saved", True, False),
        ("died", True, False),
        ("unreadable", True, False),
        ("done", True, True),
    ],
)
def test_when_a_run_is_over(state: State, over: bool, waiting_over: bool) -> None:
    run = watched(*GOING, state=state)
    assert (is_over(run, wait=False), is_over(run, wait=True)) == (over, waiting_over)
    assert not is_over(watched(*GOING, state=state, whole=False), wait=False)


@pytest.mark.parametrize(
    ("states", "code"),
    [(["done"], 0), (["done", "saved"], 75), (["saved", "died", "done"], 1), (["unreadable"], 1)],
)
def test_the_exit_code_is_that_of_the_worst_run(states: list[str], code: int) -> None:
    assert exit_code(states) == code


def test_how_a_run_ended() -> None:
    assert ending(watched(*GOING, (162.0, done()), state="done")).endswith(f"\nweights sha256 {SHA}")
    assert ending(watched(*GOING, (162.0, stopped()), state="saved")).startswith(
        "runs/a stopped by SIGTERM after step 690"
    )
    died = watched(*GOING, state="died", failure="loss is nan")
    assert ending(died) == "runs/a failed after step 69: loss is nan"
    assert ending(watched(*GOING, state="died")).startswith("runs/a ended without a reason, as SIGKILL")
    assert ending(watched(state="unreadable")) == "runs/a cannot be read: its log is damaged"


def test_what_happened_is_told_in_the_order_of_time() -> None:
    later = tuple((time + 30.5, event) for time, event in GOING)
    names = [name for name, _ in told([watched(*later, name="runs/b"), watched(*GOING)])]
    assert names == ["runs/a", "runs/b", "runs/a", "runs/b"]
