"""The console in a pipe and on a terminal."""

import io
import re
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from event_examples import SHA, done, evaluated, every, saved, started, stepped, stopped, write

from lockstep.reporting.console import Console

RULE = "learning rate 0.1"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"

Open = Callable[[bool | None], tuple[Console, io.StringIO]]


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Make consoles of 80 columns on an ordinary terminal, whatever the tests run in."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def make(terminal: bool | None) -> tuple[Console, io.StringIO]:
        stream = io.StringIO()
        return Console(stream, "runs/x", RULE, is_terminal=terminal), stream

    return make


def seen(stream: io.StringIO) -> str:
    """Return what was written, without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", stream.getvalue())


def test_in_a_pipe_a_step_has_the_means_of_its_epoch_so_far_and_the_time_left(console: Open) -> None:
    sink, stream = console(False)
    sink.write(replace(started(), fractions=["top1"]), 100.0)
    for step, epoch, loss, top1 in ((10, 0, 4.0, 0.25), (20, 0, 2.0, 0.75), (30, 1, 1.0, 1.0), (40, 1, 3.0, 0.5)):
        sink.write(replace(stepped(step, loss), epoch=epoch, figures={"top1": top1}), 100.0 + step)
    found = [line.split("  ", 2)[2] for line in stream.getvalue().splitlines()[-4:]]
    rest = "lr 0.09511  1,234 samples/s  51.8 ms/step  1000 B"
    assert found == [
        f"loss 4.0000  top1 25.00 %  {rest}  11:20 left",
        f"loss 2.0000 (3.0000)  top1 75.00 % (50.00 %)  {rest}  11:10 left",
        f"loss 1.0000  top1 100.00 %  {rest}  11:00 left",
        f"loss 3.0000 (2.0000)  top1 50.00 % (75.00 %)  {rest}  10:50 left",
    ]


def test_in_a_pipe_each_event_is_a_line(console: Open) -> None:
    sink, stream = console(False)
    write(sink, started(), stepped(), evaluated(), saved(), done())
    assert stream.getvalue().splitlines() == [
        "77,706 parameters (304 KiB in fp32), 1,437 training samples, 360 validation samples",
        "690 steps in 30 epochs of 23, batch 64 in 4 micro-batches",
        "1 process, strategy single, device cpu",
        "3.25 MFLOP for each sample, forward and backward",
        RULE,
        "epoch 3/30  step 69/690  loss 0.4321  lr 0.09511  1,234 samples/s  51.8 ms/step  1000 B  0:09 left",
        "evaluated 360 of 360  top1 98.61 %  top5 100.00 %  loss 0.1023",
        "saved runs/x/checkpoints/step-00000690  sha256 0123456789ab…  best so far",
        "steps            690",
        "samples          43,110",
        "top1             98.33 %, best 98.61 %",
        "top5             100.00 %",
        "time             0:43",
        "samples/s        1,000, including evaluations and saves",
        "skipped samples  2",
        "run folder       runs/x",
        "next             lockstep report runs/x",
        f"weights sha256 {SHA}",
    ]


@pytest.mark.parametrize(("name", "value", "terminal"), [("FORCE_COLOR", "1", None), ("TERM", "dumb", True)])
def test_a_stream_that_is_no_terminal_or_a_dumb_one_gets_no_control_sequences(
    console: Open, monkeypatch: pytest.MonkeyPatch, name: str, value: str, terminal: bool | None
) -> None:
    monkeypatch.setenv(name, value)
    sink, stream = console(terminal)
    write(sink, *every())
    assert "\x1b" not in stream.getvalue()
    assert "step 69/690" in stream.getvalue()


def test_on_a_terminal_steps_move_and_lines_stay(console: Open) -> None:
    sink, stream = console(True)
    sink.write(started(), 0.0)
    sink.write(stepped(23), 10.0)
    first = seen(stream)
    assert re.search(r"epoch 1/30  step 23/690 .*━.* 4:50 left\n?", first)
    assert "loss 0.4321  lr 0.09511  1,234 samples/s" in first
    sink.write(evaluated(), 20.0)
    sink.write(stepped(69), 30.0)
    assert "evaluated 360 of 360  top1 98.61 %" in seen(stream)
    assert "loss 0.4321  evaluated top1 98.61 %  top5 100.00 %  lr 0.09511  1,234 samples/s" in seen(stream)
    assert re.search(r"epoch 3/30  step 69/690 .* 4:30 left", seen(stream))
    assert "\x1b[1A" in stream.getvalue()  # the second drawing goes over the first
    sink.close()


def test_on_a_terminal_the_end_is_a_table_and_the_hash_a_line_of_its_own(console: Open) -> None:
    sink, stream = console(True)
    write(sink, started(), stepped(), done())
    lines = seen(stream).splitlines()
    assert any("top1" in line and "98.33 %, best 98.61 %" in line and "│" in line for line in lines)
    assert lines[-1] == f"weights sha256 {SHA}"


def test_drawing_is_not_done_more_often_than_one_sees(console: Open) -> None:
    sink, stream = console(True)
    sink.write(started(), 0.0)
    sink.write(stepped(1), 1.0)
    drawn = stream.getvalue()
    sink.write(stepped(2), 1.05)
    assert stream.getvalue() == drawn
    sink.write(stepped(3), 1.11)
    assert stream.getvalue() != drawn
    drawn = stream.getvalue()
    sink.write(stepped(690), 1.12)  # the last one always
    assert stream.getvalue() != drawn
    sink.close()


def test_the_cursor_is_never_left_hidden(console: Open) -> None:
    """Not even by a kill, which closes nothing."""
    sink, stream = console(True)
    sink.write(started(), 0.0)
    for event in [stepped(), evaluated(), saved(), stepped(92)]:
        sink.write(event, 0.0)
        text = stream.getvalue()
        assert text.rfind(SHOW_CURSOR) > text.rfind(HIDE_CURSOR)
    sink.close()
    sink.close()


def test_no_thread_draws(console: Open) -> None:
    before = threading.active_count()
    sink, _ = console(True)
    sink.write(started(), 0.0)
    assert threading.active_count() == before
    sink.close()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_long_path_can_be_copied_whole(console: Open, terminal: bool) -> None:
    sink, stream = console(terminal)
    write(sink, started(46, "runs/" + "[bold]x/" * 30))
    assert "resuming after step 46 from runs/" + "[bold]x/" * 30 + "\n" in seen(stream)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_that_is_stopped_says_so_last(console: Open, terminal: bool) -> None:
    sink, stream = console(terminal)
    write(sink, started(), stepped(), saved(), stopped())
    assert seen(stream).splitlines()[-1].startswith("stopped by SIGTERM after step 690")
