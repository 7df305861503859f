"""Logs and runs made of events, for the tests of what reads and shows them."""

import json
from collections.abc import Sequence
from typing import Any

from event_examples import evaluated, started, stepped

from lockstep.reporting.jsonl import to_json_fields
from lockstep.reporting.notices import make_notice
from lockstep.reporting.run_log import build_history
from lockstep.reporting.run_view import RunState, RunView
from lockstep.training.events import Event

GOING: Sequence[tuple[float, Event]] = (
    (100.0, started()),
    *((100.0 + step, stepped(step, 2.0 - step / 50)) for step in range(1, 60)),
    (160.0, evaluated()),
    (161.0, stepped(69)),
)


def logged(*events: tuple[float, Event]) -> list[dict[str, Any]]:
    """Return the lines of a log."""
    return [json.loads(json.dumps(to_json_fields(event, time))) for time, event in events]


def viewed(
    *events: tuple[float, Event],
    name: str = "runs/a",
    state: RunState = "running",
    failure: str = "",
    whole: bool = True,
) -> RunView:
    """Return a run whose log has these events with their times."""
    log = logged(*events)
    told = tuple(found for event in log if (found := make_notice(event, frozenset({"top1", "top5"}))))
    return RunView(
        name, state, build_history(log), failure=failure, notices=told, notice_count=len(told), is_fully_read=whole
    )
