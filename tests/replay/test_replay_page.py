"""The page of a replay."""

from pathlib import Path

import pytest
from event_examples import started, stepped, write

from lockstep.replay.page import make_sections
from lockstep.replay.run import Replay, ReplayedStep
from lockstep.reporting.charts import Chart
from lockstep.reporting.jsonl import JsonLines


@pytest.mark.parametrize(("logged", "charts"), [([3], []), ([2, 3], ["Loss"])])
def test_a_single_logged_step_is_not_drawn(tmp_path: Path, logged: list[int], charts: list[str]) -> None:
    write(JsonLines(tmp_path / "events.jsonl"), started(), *map(stepped, logged))
    replay = Replay(tmp_path, 0, "single", 1, steps=[ReplayedStep(3, 0.5, 0.1, 1, None)])
    assert [each.title for each in make_sections(replay) if isinstance(each, Chart)] == charts
