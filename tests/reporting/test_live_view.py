"""The view of runs in a terminal, and lines in a pipe, each of them once."""

import io

import pytest
from event_examples import RESUMED_FROM, done, evaluated, saved, started, stepped
from rich.console import Console
from view_examples import GOING, viewed

from lockstep.reporting.live_view import LiveView, render_runs
from lockstep.reporting.run_view import RunView


def drawn(*runs: RunView, width: int = 100, height: int = 30, curves: bool = True) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(render_runs(runs, 165.0, width, height, curves))
    return [each.rstrip() for each in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_a_run_alone_has_progress_figures_a_curve_and_what_happened() -> None:
    head, bar, figures, *rest = drawn(viewed(*GOING))
    assert head == "runs/a  running  single on 1, cpu"
    assert bar.startswith("epoch 3/30  step 69/690 ")
    assert bar.endswith("left  last event 4 s ago")
    assert "loss/train 0.4321" in figures
    assert rest[0].split("│")[0].strip() == "1.98"
    assert rest[0].split("│")[1].startswith("█")
    assert rest[5].split("│")[0].strip() == "0.4321"
    assert rest[-1].endswith("evaluated after step 69: loss/validation 0.1023, top1 98.61 %, top5 100.00 %")


def test_several_runs_have_a_line_of_curve_each_and_names_before_what_happened() -> None:
    lines = drawn(viewed(*GOING), viewed(*GOING, name="runs/b", state="failed", failure="loss is nan"))
    assert "loss is nan" in lines
    assert sum("█▇" in each for each in lines) == 2
    assert lines[-1].partition("  ")[2].startswith("runs/b  evaluated")


def test_it_fits_the_terminal() -> None:
    for width, height in ((40, 12), (80, 24), (200, 60)):
        lines = drawn(viewed(*GOING), width=width, height=height)
        assert len(lines) < height
        assert max(map(len, lines)) <= width


def test_a_terminal_without_unicode_gets_ascii() -> None:
    figures = "".join(drawn(viewed(*GOING), curves=False)[2:])
    assert figures.isascii()


def test_before_a_run_begins_and_while_its_log_is_read() -> None:
    assert drawn() == ["waiting for a run to start"]
    assert drawn(viewed(*GOING, whole=False))[1] == "reading its log: epoch 3/30  step 69/690"


def test_in_a_pipe_each_line_is_written_once() -> None:
    stream = io.StringIO()
    view = LiveView(stream, is_terminal=False)

    def new(now: float, *runs: RunView) -> list[str]:
        stream.seek(0)
        stream.truncate()
        view.show(runs, now)
        return [each.partition("  ")[2] for each in stream.getvalue().splitlines()]

    view.show((), 99.0)
    assert stream.getvalue() == "waiting for a run to start\n"
    assert new(100.0) == []
    first = new(101.0, viewed(*GOING[:3]))
    assert (first[0], first[1].partition("  ")[2], first[2][:22]) == (
        "running  single on 1, cpu",
        "started: single on 1, cpu",
        "epoch 1/30  step 2/690",
    )
    assert new(102.0, viewed(*GOING[:4])) == []  # at most a line in ten seconds
    assert new(111.0, viewed(*GOING[:4]))[0].startswith("epoch 1/30  step 3/690")
    assert new(122.0, viewed(*GOING[:4])) == []  # nothing new
    more = new(123.0, viewed(*GOING[:4], (10.0, evaluated()), (10.0, saved())))
    assert [each.partition("  ")[2].split()[0] for each in more[:2]] == ["evaluated", "saved"]
    again = new(124.0, viewed((0.0, started(46, RESUMED_FROM)), (1.0, stepped(47)), (2.0, done()), state="done"))
    assert again[0].startswith("done")
    assert "\x1b" not in stream.getvalue()


def test_in_a_terminal_the_view_is_drawn_in_one_place_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # the tests' own may be dumb, as in an editor's shell
    stream = io.StringIO()
    view = LiveView(stream, is_terminal=True)
    view.show([viewed(*GOING)], 165.0)
    view.close()
    view.close()
    text = stream.getvalue()
    assert "step 69/690" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is there
