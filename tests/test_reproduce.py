"""scripts/reproduce: it downloads, trains on several numbers of processes, and writes a table and JSON."""

import json
import os
import subprocess
import sys
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from types import ModuleType

import pytest
from cifar import ARCHIVE, write_archive
from component import script

ROOT = Path(__file__).parent.parent
# Each process of the run sees the small archive in the place of CIFAR-10.
CUSTOM = """
import json, os
from torchvision import datasets
for name, value in json.loads(os.environ["SMALL_CIFAR"]).items():
    setattr(datasets.CIFAR10, name, value)
"""


@pytest.fixture(scope="module")
def reproduce() -> ModuleType:
    return script("reproduce")


def step(number: int, samples: int, loss: float, top1: float) -> dict[str, object]:
    return {"event": "step", "step": number, "samples": samples, "loss": loss, "top1": top1}


def test_figures_are_means_over_an_epoch(reproduce: ModuleType) -> None:
    events = [
        {"event": "started", "steps_per_epoch": 2},
        step(1, 8, 3.0, 0.5),
        step(2, 10, 1.0, 1.0),
        {"event": "evaluated", "step": 2, "top1": 0.25},
        step(3, 18, 0.5, 0.75),
        step(4, 20, 0.1, 0.75),
    ]
    assert reproduce.epochs(events) == [
        {"loss": 2.0, "top1": 0.6, "validation_top1": 0.25},
        {"loss": 0.3, "top1": 0.75},
    ]


def test_the_table_has_the_figures_of_the_tutorial_beside_ours(reproduce: ModuleType) -> None:
    lines = reproduce.table([{"processes": 2, "epochs": [{"loss": 1.5, "top1": 0.45}]}])
    assert lines[1].split("  ")[-1].strip() == "Lockstep on 2"
    assert lines[2].split() == ["1", "1.658", "39.20", "1.705", "37.67", "1.806", "33.82", "1.500", "45.00"]


@pytest.mark.slow("trains several times")
def test_it_trains_on_two_numbers_of_processes_from_the_download_on(tmp_path: Path) -> None:
    server = tmp_path / "server"
    server.mkdir()
    (tmp_path / "sitecustomize.py").write_text(CUSTOM, encoding="utf-8")
    described = write_archive(server)
    line = [sys.executable, str(ROOT / "scripts" / "reproduce"), "cifar10", "--root", "data", "--processes", "1", "2"]
    line += [
        "--json",
        "results.json",
        "--set",
        "recipe.batch=8",
        "recipe.microbatch=4",
        "recipe.epochs=2",
        "run.probe=off",
    ]
    with HTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(server))) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        described["url"] = f"http://127.0.0.1:{http.server_port}/{ARCHIVE}"
        python = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": python, "SMALL_CIFAR": json.dumps(described)}
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
        http.shutdown()
        thread.join()
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "data" / ARCHIVE).exists()
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["same"]
    one, two = results["runs"]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert one["epochs"] == two["epochs"]
    assert [sorted(row) for row in one["epochs"]] == [["loss", "top1", "validation_top1"]] * 2
    assert "the same weights" in done.stdout
