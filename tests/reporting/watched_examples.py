"""Runs that are watched, made of events, for the tests of what shows them."""

import json
from collections.abc import Sequence

from event_examples import evaluated, started, stepped

from lockstep.reporting.history import history
from lockstep.reporting.jsonl import figures
from lockstep.reporting.notices import notice
from lockstep.reporting.overview import Run
from lockstep.reporting.run_page import Reported
from lockstep.reporting.status import State, status
from lockstep.reporting.watched import Watched
from lockstep.training.events import Event

GOING: Sequence[tuple[float, Event]] = (
    (100.0, started()),
    *((100.0 + step, stepped(step, 2.0 - step / 50)) for step in range(1, 60)),
    (160.0, evaluated()),
    (161.0, stepped(69)),
)


def watched(
    *events: tuple[float, Event], name: str = "runs/a", state: State = "running", failure: str = "", whole: bool = True
) -> Watched:
    """Return a run whose log has these events with their times."""
    log = [json.loads(json.dumps(figures(event, time))) for time, event in events]
    told = [found for event in log if (found := notice(event, frozenset({"top1", "top5"})))]
    run = Run(name, state, status(log), failure=failure)
    return Watched(Reported(run, history(log), {}), tuple(told), len(told), whole)
