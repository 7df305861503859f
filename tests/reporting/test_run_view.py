"""A watched run in words, and when it is over and with which exit code."""

from dataclasses import replace

import pytest
from event_examples import SHA, done, started, stepped, stopped
from view_examples import GOING, logged, viewed

from lockstep.reporting.run_log import RunStatus, build_history
from lockstep.reporting.run_view import (
    RunState,
    describe_ending,
    determine_state,
    format_eta,
    format_headline,
    format_metrics,
    format_progress,
    format_status_line,
    get_exit_code,
    is_over,
    select_latest_notices,
)


def test_a_run_that_goes_on_in_words() -> None:
    run = viewed(*GOING)
    assert format_headline(run) == "runs/a  running  single on 1, cpu"
    assert format_progress(run) == "epoch 3/30  step 69/690"
    assert format_eta(run).endswith(" left")
    assert format_metrics(run).startswith(
        "88 samples/s  loss/train 0.4321  loss/validation 0.1023  top1 98.61 %  top5 100.00 %"
    )
    assert format_status_line(run) == f"runs/a  {format_progress(run)}  {format_metrics(run)}  {format_eta(run)}"


def test_before_its_log_there_is_a_name() -> None:
    run = viewed(name="runs/\x1b[2Jx")
    assert (format_headline(run), format_progress(run), format_eta(run), format_metrics(run)) == (
        r"runs/\x1b[2Jx  running",
        "",
        "",
        "",
    )


@pytest.mark.parametrize(
    ("state", "over", "waiting_over"),
    [
        ("running", False, False),
        ("queued", False, False),
        ("saved", True, False),
        ("died", True, False),
        ("failed", True, False),
        ("unreadable", True, False),
        ("done", True, True),
    ],
)
def test_when_a_run_is_over(state: RunState, over: bool, waiting_over: bool) -> None:
    run = viewed(*GOING, state=state)
    assert (is_over(run, wait_for_completion=False), is_over(run, wait_for_completion=True)) == (over, waiting_over)
    assert not is_over(viewed(*GOING, state=state, whole=False), wait_for_completion=False)


@pytest.mark.parametrize(
    ("states", "code"),
    [(["done"], 0), (["done", "saved"], 75), (["saved", "died", "done"], 1), (["unreadable"], 1)],
)
def test_the_exit_code_is_that_of_the_worst_run(states: list[str], code: int) -> None:
    assert get_exit_code(states) == code


def test_how_a_run_ended() -> None:
    assert describe_ending(viewed(*GOING, (162.0, done()), state="done")).endswith(f"\nweights sha256 {SHA}")
    saved = viewed(*GOING, (162.0, stopped()), state="saved")
    assert describe_ending(saved) == "runs/a stopped by SIGTERM; start it again to resume"
    of_recipe = replace(saved, resume_command="lockstep train a.yaml")
    assert describe_ending(of_recipe) == "runs/a stopped by SIGTERM; to resume: lockstep train a.yaml"
    assert describe_ending(viewed(*GOING, state="failed", failure="loss is nan")) == "runs/a failed: loss is nan"
    assert describe_ending(viewed(*GOING, state="died")).startswith("runs/a ended without recording a reason")
    assert describe_ending(viewed(state="unreadable")) == "runs/a cannot be read: its log is damaged"


def test_what_happened_is_told_in_the_order_of_time() -> None:
    later = tuple((time + 30.5, event) for time, event in GOING)
    names = [name for name, _ in select_latest_notices([viewed(*later, name="runs/b"), viewed(*GOING)], 9)]
    assert names == ["runs/a", "runs/b", "runs/a", "runs/b"]


TRAINING = build_history(logged((0.0, started()), (100.0, stepped(10)))).status
STOPPED = build_history(logged((0.0, started()), (100.0, stopped()))).status
DONE = build_history(logged((0.0, started()), (100.0, done()))).status


@pytest.mark.parametrize(
    ("run", "held", "submitted", "job", "expected"),
    [
        (TRAINING, True, None, None, "running"),
        (TRAINING, False, None, None, "died"),
        (STOPPED, False, None, None, "saved"),
        (STOPPED, True, None, None, "running"),  # it goes on, and has not said so yet
        (DONE, True, None, None, "done"),
        (DONE, False, 200.0, "PENDING", "done"),
        (RunStatus(), False, None, None, "died"),
        (RunStatus(), True, None, None, "running"),
        # Nobody can be asked: what was submitted after the last event waits.
        (RunStatus(), False, 50.0, None, "queued"),
        (STOPPED, False, 50.0, None, "saved"),
        (STOPPED, False, 150.0, None, "queued"),
        (TRAINING, False, 50.0, None, "died"),
        # Slurm knows.
        (RunStatus(), False, 50.0, "PENDING", "queued"),
        (STOPPED, False, 50.0, "PENDING", "queued"),
        (STOPPED, False, 50.0, "RUNNING", "running"),
        (RunStatus(), False, 50.0, "", "died"),
        (STOPPED, False, 150.0, "", "saved"),
        (STOPPED, False, 50.0, "COMPLETING", "saved"),
        (TRAINING, False, 50.0, "NODE_FAIL", "died"),
    ],
)
def test_states(run: RunStatus, held: bool, submitted: float | None, job: str | None, expected: str) -> None:
    assert determine_state(run, held, submitted, job) == expected
