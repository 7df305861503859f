"""wandb and mlflow in the training process: what arrives there, again after a resume, and what a failure does."""

import gc
import math
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from component import require_package
from event_examples import RESUMED_FROM, done, evaluated, started, stepped, stopped, write

from lockstep.config.load import load
from lockstep.errors import UsageError
from lockstep.reporting.sink import Sink
from lockstep.reporting.tracker_id import read_id
from lockstep.run.sinks import open_sinks

RECIPE = {"recipe.seed": 0, "recipe.data.mean": [0.5, 0.5], "recipe.optimizer.lr.value": 0.1}
# mlflow's use of SQLAlchemy, and what its dependencies do while they are imported.
pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.filterwarnings("default")]


@pytest.fixture
def open_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Sink]]:
    """Open the sinks of a run that names this one, and return it."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # and what a sink sets is gone after the test
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    opened = []

    def opening(name: str, **options: Any) -> Sink:
        overrides = [f"run.sinks={[{'name': name, **options}]}", "run.tensorboard=false"]
        block = open_sinks(load("digits", overrides).config.run, RECIPE, "", tmp_path, [])
        opened.append(block)
        return block.__enter__()[-1]

    yield opening
    for block in reversed(opened):
        block.__exit__(None, None, None)


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
    write(open_sink("mlflow", experiment="mine"), started(69, RESUMED_FROM), stepped(70))
    assert client.get_run(run.info.run_id).info.status == "FAILED"


def test_wandb_takes_a_run_up_again_and_needs_neither_network_nor_key(open_sink: Any, tmp_path: Path) -> None:
    require_package("wandb")
    write(open_sink("wandb", project="mine", tags=["a"]), started(), stepped(23), stopped())
    first = read_id(tmp_path, "wandb")
    write(open_sink("wandb", project="mine"), started(23, RESUMED_FROM), stepped(46), evaluated(), done())
    assert first == read_id(tmp_path, "wandb") != ""
    import wandb

    wandb.teardown()  # as at the end of the process: wandb's own writes the file
    kept = sorted((tmp_path / "wandb").glob(f"offline-run-*-{first}*/run-{first}.wandb"))
    assert kept
    content = b"".join(path.read_bytes() for path in kept)
    assert all(word in content for word in (b"loss/train", b"top1", b"recipe.optimizer.lr.value"))


def test_a_run_of_wandb_of_the_users_own_is_another_one(open_sink: Any, tmp_path: Path) -> None:
    require_package("wandb")
    import wandb

    with wandb.init(dir=str(tmp_path), id="mine") as mine:
        write(open_sink("wandb"), started(), stepped(23), done())
        assert read_id(tmp_path, "wandb") != "mine"
        assert wandb.run is mine


def test_one_that_does_not_open_is_refused_with_its_reason(open_sink: Any, tmp_path: Path) -> None:
    require_package("mlflow")
    with pytest.raises(UsageError, match=r"sink mlflow: .*nowhere"):
        open_sink("mlflow", uri="nowhere://x")


def test_wandb_without_a_key_is_refused_and_asks_for_none(
    open_sink: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_package("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"sink wandb: .*key"):
        open_sink("wandb", mode="online")


def test_wandb_whose_service_is_gone_is_off_with_one_warning(open_sink: Any, capsys: pytest.CaptureFixture) -> None:
    require_package("wandb")
    sink = open_sink("wandb")
    children = " ".join(file.read_text() for file in Path("/proc/self/task").glob("*/children")).split()
    services = [pid for pid in children if "wandb" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert services
    for pid in services:
        os.kill(int(pid), signal.SIGKILL)
    for step in range(1, 4):
        sink.write(stepped(step), 1.0)
    sink.close()
    said = capsys.readouterr().err
    assert said.count("warning: sink wandb: ") == 1
    assert said.count("; the sink is off, and the run continues without it") == 1
    import wandb

    with suppress(OSError):  # the next test starts another
        wandb.teardown()
    # wandb waits for no service that is gone: Python would warn of it in whichever test comes next.
    started_here = [each for each in gc.get_objects() if type(each) is subprocess.Popen]
    for process in started_here:
        if str(process.pid) in services:
            process.wait(10)


class Server(BaseHTTPRequestHandler):
    """A tracking server that knows one experiment and makes one run; it fails to take figures."""

    def do_GET(self) -> None:
        self._answer(200, b'{"experiment": {"experiment_id": "1", "name": "lockstep"}}')

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        figures = self.path.endswith("log-batch") and b'"metrics"' in content
        self._answer(503 if figures else 200, b'{"run": {"info": {"run_id": "r"}, "data": {}, "inputs": {}}}')

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_mlflow_whose_server_fails_is_off_with_one_warning(
    open_sink: Any, server: str, capsys: pytest.CaptureFixture
) -> None:
    require_package("mlflow")
    with closing(open_sink("mlflow", uri=server)) as sink:
        drawn = random.getstate()
        for step in range(1, 4):
            sink.write(stepped(step), 1.0)
    assert random.getstate() == drawn  # it draws how long it waits before it asks again
    said = capsys.readouterr().err
    assert said.count("warning: sink mlflow: ") == 1
    assert said.count("; the sink is off, and the run continues without it") == 1
