"""What older versions wrote is read in the words of today, and what newer ones wrote is refused."""

import json
from pathlib import Path

import pytest

from lockstep.common import schemas
from lockstep.errors import UsageError
from lockstep.training.checkpoint import saved_state

OLD = Path(__file__).parent.parent / "fixtures" / "0.1"


def old_state() -> dict:
    return json.loads((OLD / "digits/checkpoints/step-00000030/state.json").read_text())


def test_a_recipe_of_before_has_the_order_it_was_made_by() -> None:
    assert schemas.recipe({"seed": 3}) == {"seed": 3, "order": "argsort"}
    assert schemas.recipe({"order": "bijection"}) == {"order": "bijection"}


def test_a_state_of_before_is_one_of_today() -> None:
    before = old_state()
    now = schemas.state(before)
    assert now["schema"] == schemas.SCHEMA
    assert now["recipe"] == {**before["recipe"], "order": "argsort"}
    assert now["progress"]["figures"] == before["progress"]["top"]
    assert "top" not in now["progress"]
    assert schemas.state(now) == now
    assert before == old_state()


def test_events_of_before_are_events_of_today() -> None:
    found = [schemas.event(json.loads(line)) for line in (OLD / "digits/events.jsonl").read_text().splitlines()]
    assert (found[0]["unit"], found[0]["fractions"]) == ("samples", ["top1", "top5"])
    steps = [event for event in found if event["event"] == "step"]
    assert len(steps) == 33
    assert all("images_per_s" not in event and event["samples_per_s"] > 0 for event in steps)
    assert [schemas.event(event) for event in found[1:]] == found[1:]


@pytest.mark.parametrize("state", [{}, {"progress": 3, "recipe": "r"}, {**old_state(), "schema": "two"}])
def test_what_is_no_state_stays_none(state: dict, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not what this version writes"):
        saved_state.parse_state(tmp_path / "step-00000001", state)


def test_the_state_of_a_newer_version_is_refused_in_a_line(tmp_path: Path) -> None:
    newer = {**old_state(), "schema": schemas.SCHEMA + 1, "unheard": "of"}
    with pytest.raises(UsageError) as caught:
        saved_state.parse_state(tmp_path, newer)
    assert str(caught.value) == (
        f"{tmp_path}/state.json: written by a newer version: schema 3, and this version of Lockstep reads 2 and older; "
        f"use the one that wrote it"
    )


def test_the_state_of_before_is_parsed() -> None:
    state = saved_state.parse_state(OLD / "digits/checkpoints/step-00000030", old_state())
    assert state.progress.step == 30
    assert state.progress.figures == pytest.approx({"top1": 0.1444, "top5": 0.5972}, rel=0.5)
    assert state.recipe["order"] == "argsort"
