"""wandb and mlflow in a process of their own: what arrives there, again after a resume, and what a failure does."""

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from component import require_package
from event_examples import RESUMED_FROM, done, evaluated, started, stepped, stopped, write

from lockstep.errors import TrainingError, UsageError
from lockstep.reporting.outside import Outside
from lockstep.reporting.tracker_id import read_id

RECIPE = {"recipe.seed": 0, "recipe.data.mean": [0.5, 0.5], "recipe.optimizer.lr.value": 0.1}


@pytest.fixture
def open_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outside]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return lambda name, **options: Outside(name, tmp_path, options, RECIPE, tmp_path / "logs" / f"{name}.log")


@pytest.mark.filterwarnings("ignore:.*noload")  # mlflow's use of SQLAlchemy, in this process to read it back
def test_mlflow_has_the_curves_and_the_recipe_in_one_run(open_sink: Any, tmp_path: Path) -> None:
    require_package("mlflow")
    write(open_sink("mlflow", experiment="mine"), started(), stepped(23), stepped(46), stopped())
    write(open_sink("mlflow", experiment="mine"), started(46, RESUMED_FROM), stepped(69, math.nan), evaluated(), done())
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.run_id == read_id(tmp_path, "mlflow")
    assert run.info.status == "FINISHED"
    assert run.data.params["recipe.optimizer.lr.value"] == "0.1"
    history = client.get_metric_history(run.info.run_id, "loss/train")
    assert [(metric.step, metric.value) for metric in history] == [(23, 0.43214), (46, 0.43214)]
    assert run.data.metrics["top1"] == pytest.approx(355 / 360)


def test_wandb_takes_a_run_up_again_and_needs_neither_network_nor_key(open_sink: Any, tmp_path: Path) -> None:
    require_package("wandb")
    write(open_sink("wandb", project="mine", tags=["a"]), started(), stepped(23), stopped())
    first = read_id(tmp_path, "wandb")
    write(open_sink("wandb", project="mine"), started(23, RESUMED_FROM), stepped(46), evaluated(), done())
    assert first == read_id(tmp_path, "wandb") != ""
    kept = sorted((tmp_path / "wandb").glob(f"offline-run-*-{first}*/run-{first}.wandb"))
    assert kept
    content = b"".join(path.read_bytes() for path in kept)
    assert all(word in content for word in (b"loss/train", b"top1", b"recipe.optimizer.lr.value"))


def test_one_that_does_not_open_is_refused_with_its_reason(open_sink: Any, tmp_path: Path) -> None:
    require_package("mlflow")
    with pytest.raises(UsageError, match=r"sink mlflow: .*nowhere"):
        open_sink("mlflow", uri="nowhere://x")


def test_a_process_that_is_gone_is_an_error_of_the_sink(open_sink: Any) -> None:
    require_package("wandb")
    sink = open_sink("wandb")
    os.kill(sink._process.pid, signal.SIGKILL)
    sink._process.wait()
    with pytest.raises(TrainingError, match="sink wandb: its process has ended; see its log"):
        sink.write(stepped(), 1.0)
    with pytest.raises(TrainingError, match="sink wandb: "):
        sink.close()


def test_one_that_does_not_keep_up_does_not_hold_training(open_sink: Any) -> None:
    require_package("wandb")
    sink = open_sink("wandb")
    os.kill(sink._process.pid, signal.SIGSTOP)

    def many() -> None:
        for step in range(1, 20_000):
            sink.write(stepped(step), 1.0)

    with pytest.raises(TrainingError, match="sink wandb: it does not keep up with the run"):
        many()
    os.kill(sink._process.pid, signal.SIGKILL)
    with pytest.raises(TrainingError):
        sink.close()
