"""result.json has the exit code of the last start, also of one that failed: scripts go by it."""

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from conftest import DIGITS, FOLDER
from forked import as_rank
from waiting import free_port

pytestmark = pytest.mark.slow("runs whole commands")

TRAIN = ("train", *DIGITS, "run.dir=run")
ALONE = {"RANK": "0", "WORLD_SIZE": "1"}  # as another launcher has it
MISSING = "recipe.data={name: folder, root: nowhere}"


@pytest.fixture(autouse=True)
def stopped(tmp_path: Path) -> None:
    """Let the last start have been stopped and saved."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text('{"event": "stopped", "time": 1.5, "exit_code": 75}')


def result(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "run" / "result.json").read_text(encoding="utf-8"))
    assert found.pop("time") > 1.5
    assert found.pop("host") == socket.gethostname()
    return found


def test_a_start_that_is_refused_leaves_the_result_of_the_one_before(run, tmp_path: Path) -> None:
    (tmp_path / "run" / "events.jsonl").touch()
    before = (tmp_path / "run" / "result.json").read_bytes()
    for env in ({}, ALONE):
        refused = run(*TRAIN, "run.resume=never", code=2, **env)
        assert "run: contains a run, but run.resume is never; choose a different run.dir, or set" in refused.err
        assert (tmp_path / "run" / "result.json").read_bytes() == before
    refused = run(*TRAIN, "run.resume=auto", MISSING, code=2, **ALONE)
    assert "contains a run without config.yaml" in refused.err
    assert (tmp_path / "run" / "result.json").read_bytes() == before


def test_of_a_mistake_that_is_found_in_the_claimed_folder(run, tmp_path: Path) -> None:
    before = (tmp_path / "run" / "result.json").read_bytes()
    assert "nowhere" in run(*TRAIN, MISSING, code=2, **ALONE).err
    assert (tmp_path / "run" / "result.json").read_bytes() == before


def test_a_refused_start_leaves_no_folder_that_it_made(run, tmp_path: Path) -> None:
    run("train", *DIGITS, "run.dir=runs/deep/a", MISSING, code=2, **ALONE)
    run("train", *DIGITS, MISSING, code=2, **ALONE)
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs").mkdir()
    run("train", *DIGITS, "run.dir=runs/deep/a", MISSING, code=2, **ALONE)
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_of_a_rank_that_fails_and_gone_before(run, tmp_path: Path, processes: int) -> None:
    command = run(*TRAIN, 'recipe.loss={name: "ending:looking"}', f"placement.processes={processes}", code=2)
    assert "ValueError: result.json is there: False" in command.err + command.out
    found = result(tmp_path)
    assert "ValueError: result.json is there: False (" in found.pop("reason")
    assert found.pop("ranks") in ([0], [1])
    assert found == {"event": "failed", "exit_code": 2, "cause": "code"}


@pytest.mark.parametrize(("processes", "ranks"), [(1, [0]), (2, [0, 1])])
def test_of_a_file_that_is_damaged(run, tmp_path: Path, images: Path, processes: int, ranks: list[int]) -> None:
    (images / "val/dog/0.jpg").write_bytes(b"no picture")
    run(*TRAIN, *FOLDER, f"placement.processes={processes}", code=1)
    found = result(tmp_path)
    assert "images/val/dog/0.jpg: cannot be read as an image" in found.pop("reason")
    assert found.pop("ranks")[0] in ranks
    assert found == {"event": "failed", "exit_code": 1, "cause": "data"}


@pytest.mark.parametrize("launched", [False, True])
def test_of_a_rank_that_is_killed(start, tmp_path: Path, launched: bool) -> None:
    if launched:
        port = free_port()
        commands = [start(*TRAIN, "recipe.epochs=50", **as_rank(rank, 2, port)) for rank in range(2)]
    else:
        commands = [start(*TRAIN, "recipe.epochs=50", "placement.processes=2")]
    commands[0].until_step(2)
    if launched:
        commands[1].signal(signal.SIGKILL)
    else:
        os.kill(commands[0].workers()[1], signal.SIGKILL)
    assert commands[0].wait() == 1
    found = result(tmp_path)
    assert "killed" in found.pop("reason")
    assert found == {"event": "failed", "exit_code": 1, "cause": "transient", "ranks": [1]}
