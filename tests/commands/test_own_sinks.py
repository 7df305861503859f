"""Sinks of a loop of the user's own: those of a recipe, which see the same on any ranks, also after a kill."""

import json
import signal
from pathlib import Path

import pytest
from component import require_package
from event_examples import rows
from test_sinks import SINK

pytestmark = [pytest.mark.slow("runs whole commands"), pytest.mark.worlds]
SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import lockstep

def main(folder, sinks, precision="fp32"):
    settings = {"sinks": sinks, "log_every": 1}
    run = lockstep.join(seed=0, dir=folder, precision=precision, run=settings)
    data = TensorDataset(torch.randn(96, 6), torch.arange(96) % 3)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Dropout(0.2), nn.Linear(9, 3))
    model, _ = run.place(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in run.steps(data, batch=8, microbatches=4, epochs=2):
        for x, y in step:
            step.backward(sum=F.cross_entropy(model(x), y, reduction="sum"))
        step.update()
        if step.every(steps=4):
            right = run.sum((model(x).argmax(1) == y).sum() for x, y in run.each(data))
            run.log(accuracy=right / len(data))
            run.save()
        if step.every(steps=10):
            run.log(quick=step.loss)

if __name__ == "__main__":
    main("run", eval(sys.argv[1]), *sys.argv[2:])
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT)
    (tmp_path / "mine.py").write_text(SINK)


def on(ranks: int, sinks: str, *more: str) -> tuple[str, ...]:
    return ("launch", f"--processes-per-node={ranks}", "--", "python", "loop.py", sinks, *more)


def test_a_killed_loop_goes_on_in_the_same_tables_and_curves(start, run) -> None:
    sinks = "['csv', 'mine:Sink']"
    killed = start(*on(1, sinks))
    killed.until_step(7)  # the next step saves
    killed.signal_group(signal.SIGKILL)
    killed.wait()
    resumed = run(*on(2, sinks))
    steps, logs = (rows(resumed.folder / "run" / f"{name}.csv") for name in ("steps", "logged"))
    assert [int(row["step"]) for row in steps] == list(range(1, 25))
    logged = [(int(row["step"]), bool(row["accuracy"]), bool(row["quick"])) for row in logs]
    assert [each for each in logged if each[1]] == [(step, True, False) for step in range(4, 25, 4)]
    assert [each[0] for each in logged if each[2]] == [10, 20]
    lines = [json.loads(line) for line in (resumed.folder / "run/events.jsonl").read_text().splitlines()]
    mine = [json.loads(line) for line in (resumed.folder / "run/mine.jsonl").read_text().splitlines()]
    again = [event["event"] for event in lines].index("started", 1)
    # Sinks are written to one after the other, and the process may be killed in between.
    assert mine in (lines, [*lines[: again - 1], *lines[again:]])
    assert "mine.py" in json.loads((resumed.folder / "run/environment.json").read_text())["source"]
    assert len(list((resumed.folder / "run/tensorboard").iterdir())) == 2
    assert "step 24  accuracy" in (resumed.folder / "run/logs/rank-0.log").read_text()
    (resumed.folder / "run").rename(resumed.folder / "first")
    assert run(*on(1, "[]")).sha256 == resumed.sha256


def test_one_that_does_not_open_ends_the_start_and_one_that_fails_later_is_off(run) -> None:
    refused = run(*on(2, "[{'name': 'mine:Sink', 'fails_at': 'opening'}]"), code=2)
    assert "sink mine:Sink: RuntimeError: no room (mine.py:8)" in refused.err
    assert "Traceback" not in refused.err
    warned = run(*on(1, "[{'name': 'mine:Sink', 'fails_at': 'step'}]"))
    assert "sink mine:Sink: RuntimeError: no more (mine.py:12); fix it there; the sink is off" in warned.err


def test_what_join_is_told_wrongly_is_reported_once(run) -> None:
    refused = run(*on(2, "['cvs']", "fp23"), code=2)
    assert refused.err.count("loop.py:11  run.sinks.0.name: no such sink; did you mean 'csv'?") == 1
    assert refused.err.count("loop.py:11  precision: expected one of fp32, ") == 1
    assert "Traceback" not in refused.err
    assert not (refused.folder / "run").exists()


def test_a_service_has_one_run_of_a_killed_and_resumed_loop(start, run, monkeypatch) -> None:
    """That of mlflow is resumed in reporting/test_trackers.py."""
    name = "wandb"
    require_package(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    killed = start(*on(1, f"['{name}']"), WANDB_MODE="offline")
    killed.until_step(7)  # the next step saves
    killed.signal_group(signal.SIGKILL)
    killed.wait()
    number = (killed.folder / f"run/{name}-run.txt").read_text()
    resumed = run(*on(2, f"['{name}']"), WANDB_MODE="offline")
    assert (resumed.folder / f"run/{name}-run.txt").read_text() == number
    assert "warning" not in resumed.err
