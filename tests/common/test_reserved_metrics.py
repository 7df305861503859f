"""Names that figures cannot have: all fields of the events that figures are written into, and no others."""

from dataclasses import fields

import pytest

from lockstep.common.reserved_metrics import RESERVED_BY_EVENTS, RESERVED_IN_TRAINING, find_reserved_name
from lockstep.training.events import Done, Evaluated, Logged, Stepped

WRITTEN_OTHERWISE = {"name", "figures", "best"}  # as `event`, and under the names of the figures


@pytest.mark.parametrize(
    ("events", "reserved"), [((Logged,), RESERVED_BY_EVENTS), ((Stepped, Evaluated, Done), RESERVED_IN_TRAINING)]
)
def test_fields_of_events_are_reserved(events: tuple[type, ...], reserved: frozenset[str]) -> None:
    own = {field.name for event in events for field in fields(event)} | {"event", "time"}
    assert reserved == own - WRITTEN_OTHERWISE - {"loss"}


def test_the_first_that_is_taken_is_named() -> None:
    assert find_reserved_name({"top1": 1.0, "lr": 0.1, "step": 2.0}, RESERVED_IN_TRAINING) == "lr"
    assert find_reserved_name(["top1", "lr"], RESERVED_BY_EVENTS) is None
