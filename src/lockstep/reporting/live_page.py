"""Runs that are watched, as the sections of a page that a browser asks for again and again."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Final

from lockstep.reporting.page import Progress, Section, Table, live_parts
from lockstep.reporting.run_page import sections
from lockstep.reporting.watched import Watched, figures, headline, left, place, told

_NOTICES: Final = 10


def live_data(watched: Sequence[Watched], over: bool) -> bytes:
    """Return the JSON for a live page; `over` says that nothing more is to come."""
    found = {"title": title(watched), "over": over, "parts": live_parts(live_sections(watched))}
    return json.dumps(found, allow_nan=False, separators=(",", ":")).encode(errors="backslashreplace")


def title(watched: Sequence[Watched]) -> str:
    """Name the runs in a few words: one with its state and how far it is."""
    if len(watched) != 1:
        return f"{len(watched)} runs"
    [run] = (each.run for each in watched)
    done = f" {100 * run.status.step // run.status.steps} %" if run.status.step and run.status.steps else ""
    return f"{run.state}{done} {run.folder}"


def live_sections(watched: Sequence[Watched]) -> list[Section]:
    """Return how far each run is, what happened last, and then what a page of runs shows."""
    shown: list[Section] = [_progress(each) for each in watched]
    rows = [
        [notice.words, name, "" if notice.time is None else time.strftime("%H:%M:%S", time.localtime(notice.time))]
        for name, notice in reversed(told(watched)[-_NOTICES:])
    ]
    if rows:
        shown.append(Table("What happened last", ["", "run", "at"], rows))
    return [*shown, *(sections([each.reported for each in watched]) if watched else [])]


def _progress(each: Watched) -> Progress:
    status = each.run.status
    said = "" if status.time is None else f"last event at {time.strftime('%H:%M:%S', time.localtime(status.time))}"
    total = max(status.steps or 0, status.step or 0, 1)
    lines = ["  ".join(word for word in (place(each), left(each), said) if word), figures(each)]
    if not each.is_whole:
        lines.insert(0, "reading its log")
    return Progress(headline(each), status.step or 0, total, [line for line in lines if line])
