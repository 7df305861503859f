"""What Ray is told, by a stand-in for it: the figures of each save on every rank, and the run folder on rank 0."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lockstep.reporting.ray import RayReport
from lockstep.training.events import Done, Logged, Saved

AT = {"epoch": 0, "samples": 8}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], Any]]:
    """Return what was reported: the metrics, and what the checkpoint holds."""
    found: list[tuple[dict[str, Any], Any]] = []
    read = SimpleNamespace(from_directory=lambda folder: json.loads((Path(folder) / "lockstep.json").read_text()))
    train = SimpleNamespace(Checkpoint=read, report=lambda *given: found.append(given))
    module = ModuleType("ray")
    module.train = train
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setitem(sys.modules, "ray.train", train)
    return found


def saved(step: int) -> Saved:
    return Saved(step=step, **AT, path="runs/a/checkpoints", weights_sha256="b0", best=False, seconds=0.1)


def done(step: int) -> Done:
    return Done(step=step, **AT, weights_sha256="d0")


@pytest.mark.parametrize(("lead", "checkpoint"), [(True, {"run_dir": "runs/a"}), (False, None)])
def test_a_save_is_reported_with_the_last_figures(lead: bool, checkpoint: Any, told: list[Any]) -> None:
    report = RayReport("runs/a", lead)
    report.write(Logged(step=3, **AT, figures={"r2": 0.5}), 0.0)
    assert told == []
    report.write(saved(3), 0.0)
    report.write(done(3), 0.0)  # of which all is reported
    assert told == [({"r2": 0.5, "step": 3, **AT, "weights_sha256": "b0", "run_dir": "runs/a"}, checkpoint)]


def test_a_start_with_nothing_left_to_do_reports_the_end(told: list[Any]) -> None:
    RayReport("runs/a", is_rank_0=True).write(done(9), 0.0)
    assert told == [({"step": 9, **AT, "weights_sha256": "d0", "run_dir": "runs/a"}, {"run_dir": "runs/a"})]
