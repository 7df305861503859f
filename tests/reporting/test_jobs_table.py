"""The table of runs, on a terminal and in a pipe."""

import io
import re
from dataclasses import replace

import pytest
from event_examples import evaluated, started, stepped
from view_examples import logged

from lockstep.reporting.jobs_table import format_age, format_cells, print_overview
from lockstep.reporting.run_log import build_history
from lockstep.reporting.run_view import RunView

EVENTS = [(0.0, started()), (10.0, evaluated()), (60.0, stepped(60, loss=0.5))]
RUNNING = RunView("runs/a", "running", build_history(logged(*EVENTS)), 12, "RUNNING")
QUEUED = RunView("runs/a-name-that-is-long", "queued", job=13, job_state="PENDING (Resources)")

HEADINGS = ("run", "state", "figure", "loss", "step", "job", "left", "last", "samples/s", "epoch")


def lines(*runs: RunView, terminal: bool = False) -> list[str]:
    stream = io.StringIO()
    print_overview(runs, 100.0, stream, terminal)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_each_run_is_a_line_of_words_and_figures() -> None:
    assert format_cells(RUNNING, 100.0) == (
        "runs/a",
        "running",
        "top1 98.61 %",
        "0.1023",
        "60/690",
        "12 RUNNING",
        "10:30",
        "40 s ago",
        "64",
        "3/30",
    )
    assert format_cells(QUEUED, 100.0) == (QUEUED.folder, "queued", *[""] * 3, "13 PENDING (Resources)", *[""] * 4)


def test_the_best_is_marked_and_a_loss_of_training_is_called_so() -> None:
    better = build_history(logged((0.0, started()), (1.0, replace(evaluated(), figures={"top1": 0.99}))))
    training = build_history(logged((0.0, started()), (60.0, stepped(60, loss=0.5))))
    runs = (RUNNING, RunView("runs/b", "running", better), RunView("runs/c", "running", training))
    head, *rows = lines(*runs)
    at = head.index("best")
    assert [row[at : at + 7] for row in rows] == ["       ", "by top1", "       "]
    assert rows[2].split()[2:4] == ["train", "0.5000"]


def test_in_a_pipe_nothing_is_cut_and_columns_stand_below_each_other() -> None:
    head, running, queued = lines(RUNNING, QUEUED)
    assert "\x1b" not in head
    assert running.index("running") == queued.index("queued") == head.index("state")
    assert running.index("12 RUNNING") == queued.index("13 PENDING (Resources)") == head.index("job")


def test_columns_in_which_nothing_stands_are_left_out() -> None:
    assert lines(QUEUED)[0].split() == ["run", "state", "job"]


@pytest.mark.parametrize(
    ("columns", "left_out"),
    [
        ("122", ""),
        ("101", "epoch, samples/s, last"),
        ("91", "epoch, samples/s, last, left"),
        ("80", "epoch, samples/s, last, left, job"),
        ("40", "epoch, samples/s, last, left, job, step"),
    ],
)
def test_a_terminal_gets_colors_and_what_it_has_room_for(
    monkeypatch: pytest.MonkeyPatch, columns: str, left_out: str
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.delenv("NO_COLOR", raising=False)
    head, *rows = lines(RUNNING, QUEUED, terminal=True)
    assert "\x1b[32mrunning" in rows[0]
    said = f"hidden, because the terminal is too narrow: {left_out}"
    assert rows[2:] == ([said] if left_out else [])
    plain = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join([head, *rows[:2]])).splitlines()
    assert columns == "40" or max(map(len, plain)) <= int(columns)
    assert plain[0].split() == [each for each in HEADINGS if each not in left_out.split(", ")]


def test_keys_in_which_recipes_differ_are_columns_and_the_rest_is_named() -> None:
    recipe = {f"a.key{number}": "1" for number in range(7)} | {"loss.name": "x", "optimizer.lr.value": "0.1"}
    other = dict.fromkeys(recipe, "2")
    runs = [RunView(name, "running", recipe=each) for name, each in (("a", recipe), ("b", other), ("c", {}))]
    assert lines(*runs[:1]) == ["run  state", "a    running"]
    head, a, b, c, rest = lines(*runs)
    assert head.split() == ["run", "state", "lr", *(f"key{number}" for number in range(4))]
    assert (a.split()[2:], b.split()[2:], c.split()[2:]) == (["0.1", *["1"] * 4], ["2"] * 5, [])
    assert rest == "the runs also differ in a.key4, a.key5, a.key6, loss.name"


def test_headings_of_keys_are_short_where_no_two_are_alike() -> None:
    recipe = {"loss.name": "x" * 40, "optimizer.lr.value": "0.1", "model.name": "x", "one.x": "1", "two.x": "1"}
    runs = [RunView(name, "running", recipe=each) for name, each in (("a", recipe), ("b", dict.fromkeys(recipe, "")))]
    head, first, _ = lines(*runs)
    assert head.split() == ["run", "state", "model", "lr", "loss.name", "one.x", "two.x"]
    assert "x" * 23 + "…" in first


def test_why_runs_failed_stands_below_the_table() -> None:
    assert lines(RunView("a", "failed", failure="no room"))[-1] == "a failed: no room"


def test_what_is_done_has_no_time_left() -> None:
    assert format_cells(RunView("runs/a", "done", RUNNING.history), 100.0)[6] == ""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-3.0, "0 s ago"), (59.4, "59 s ago"), (90.0, "2 min ago"), (7200.0, "2 h ago"), (200_000.0, "2 d ago")],
)
def test_ages(seconds: float, words: str) -> None:
    assert format_age(seconds) == words
