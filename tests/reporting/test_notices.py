"""What a watcher is told of events: one line each, of text that is fit to print, and nothing of a step."""

from dataclasses import replace

import pytest
from event_examples import RESUMED_FROM, SHA, done, evaluated, saved, started, stepped, stopped
from view_examples import logged

from lockstep.reporting.notices import make_notice
from lockstep.training.events import Corrupted, Event, Skipped, Warned

WARNED = Warned(step=0, epoch=0, samples=0, culprit="x", text="the \x1b[2Jnumbers\nmay differ")
CORRUPTED = Corrupted(step=11, epoch=0, samples=704, ranks=(1,), text="audit at step 12: rank 1 (a\x1b) got")
SKIPPED = Skipped(step=0, epoch=0, samples=0, files=("a.jpg", "b\x1b.jpg"))


@pytest.mark.parametrize(
    ("event", "kind", "words"),
    [
        (started(), "start", "started: single on 1, cpu"),
        (replace(started(46, RESUMED_FROM), again=23), "start", "resumed after step 46: single on 1, cpu, 23 later"),
        (evaluated(), "evaluation", "evaluated after step 69: loss/validation 0.1023, top1 98.61 %, top5 100.00 %"),
        (saved(), "checkpoint", "saved after step 690: runs/x/checkpoints/step-00000690, best so far"),
        (WARNED, "warning", r"warning: the \x1b[2Jnumbers\nmay differ"),
        (SKIPPED, "warning", r"skipped 2 unreadable files: a.jpg, b\x1b.jpg"),
        (CORRUPTED, "warning", r"audit at step 12: rank 1 (a\x1b) got"),
        (stopped(), "end", "stopped by SIGTERM after step 690"),
        (done(), "end", f"done after step 690, weights sha256 {SHA}"),
    ],
)
def test_what_is_told_of_an_event(event: Event, kind: str, words: str) -> None:
    [line] = logged((7.0, event))
    found = make_notice(line, frozenset({"top1", "top5"}))
    assert (found.time, found.kind) == (7.0, kind)
    assert found.text.startswith(words)


def test_of_a_step_nothing_is_told() -> None:
    assert make_notice(*logged((7.0, stepped()))) is None


@pytest.mark.parametrize(
    "kind", ["started", "evaluated", "saved", "warning", "skipped", "corrupted", "stopped", "done"]
)
@pytest.mark.parametrize("value", [None, [1], "x\x1b", -1, 10**400, {"a": 1}, True])
def test_events_of_others_are_told_as_text(kind: str, value: object) -> None:
    names = ("time", "step", "text", "files", "path", "strategy", "processes", "reason", "again", "loss", "weights")
    found = make_notice({"event": kind, **dict.fromkeys(names, value)})
    assert "\x1b" not in found.text
    assert found.time is None or found.time >= 0
