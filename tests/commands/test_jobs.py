"""`lockstep jobs` on run folders in every state, good and bad."""

import fcntl
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import invoke, put
from forked import imported

from lockstep.config.load import load, to_yaml
from lockstep.launchers import batch
from lockstep.runs.runs import SubmittedJob, record_job

pytestmark = pytest.mark.slow("runs whole commands")

STARTED = {"event": "started", "time": 100.0, "step": 0, "samples": 0, "steps": 50, "steps_per_epoch": 10, "epochs": 5}
STEP = {"event": "step", "time": 110.0, "step": 10, "samples": 640, "loss": 0.25}
STOPPED = {"event": "stopped", "time": 110.5, "step": 10, "samples": 640, "reason": "SIGTERM"}
DONE = {"event": "done", "time": 120.0, "step": 50, "samples": 3200}


show = partial(invoke, "jobs")


@pytest.fixture
def folder(programs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the test's folder; there is no Slurm."""
    monkeypatch.setenv("PATH", f"{programs}/bin")
    return programs


def run_folder(folder: Path, name: str, *events: dict[str, Any], tail: str = "", job: int | None = None) -> Path:
    run = folder / "runs" / name
    run.mkdir(parents=True)
    (run / "lock").touch()
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + tail, encoding="utf-8")
    if job is not None:
        record_job(run, SubmittedJob(job, 90.0))
    return run


def squeue(folder: Path, text: str) -> None:
    put(folder, "squeue", f"#!/bin/sh\n{text}\n")


def states() -> dict[str, str]:
    return {each["run"]: each["state"] for each in json.loads(show("--json").stdout)}


def test_states_and_order(folder: Path) -> None:
    run_folder(folder, "died", STARTED, STEP)
    run_folder(folder, "saved", STARTED, STEP, STOPPED)
    run_folder(folder, "done", STARTED, DONE)
    held = run_folder(folder, "going", {**STARTED, "time": 50.0})
    with (held / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = states()
    assert list(found.items()) == [
        ("runs/done", "done"),
        ("runs/saved", "saved"),
        ("runs/died", "died"),
        ("runs/going", "running"),
    ]
    assert states()["runs/going"] == "died"


def test_to_look_does_not_keep_a_run_from_beginning(folder: Path) -> None:
    run = run_folder(folder, "a", STARTED)
    with (run / "lock").open() as other:  # somebody else who looks at the same time
        fcntl.flock(other, fcntl.LOCK_SH)
        assert states() == {"runs/a": "died"}


def test_figures_as_json(folder: Path) -> None:
    evaluated = {"event": "evaluated", "time": 111.0, "step": 10, "top1": 0.5}
    run_folder(folder, "a", {**STARTED, "monitor": "top1"}, {**STEP, "loss": "NaN"}, evaluated)
    [found] = json.loads(show("--json").stdout, parse_constant=lambda text: pytest.fail(text))
    assert found == {
        "run": "runs/a",
        "state": "died",
        "last": "evaluated",
        "time": 111.0,
        "reason": None,
        "step": 10,
        "steps": 50,
        "epoch": 1,
        "epochs": 5,
        "samples_per_s": 64.0,
        "left_s": 40.0,
        "loss": "nan",
        "top1": 0.5,
        "job": None,
        "slurm": None,
        "failure": None,
        "differs": {},
    }


def test_a_table_for_people(folder: Path) -> None:
    run_folder(folder, "a", STARTED, STEP, STOPPED, job=12)
    head, line, why = show().stdout.splitlines()
    assert why == "runs/a stopped by SIGTERM; start it again to resume"
    assert head.split() == ["run", "state", "loss", "step", "job", "left", "last", "samples/s", "epoch"]
    assert line.split()[:7] == ["runs/a", "saved", "train", "0.2500", "10/50", "12", "0:40"]
    assert line.split()[-4:] == ["d", "ago", "64", "1/5"]


def config(run: Path, *overrides: str) -> None:
    (run / "config.yaml").write_text(to_yaml(load("digits", overrides)), encoding="utf-8")


def test_what_differs_between_runs(folder: Path) -> None:
    config(run_folder(folder, "a", {**STARTED, "time": 50.0}), "recipe.data.root=/elsewhere")
    config(run_folder(folder, "b", STARTED), "recipe.optimizer.lr=0.2", "recipe.model=resnet18")
    run_folder(folder, "c", STARTED)
    head, b, c, a, _ = show().stdout.splitlines()
    assert head.split()[:7] == ["run", "state", "step", "model", "lr", "source", "dropout"]
    assert (b.split()[3:6], a.split()[3:7]) == (
        ["resnet18", "0.2", "auto"],
        ["digits_convnet", "0.1", "lockstep", "0.1"],
    )
    assert c.split()[:2] == ["runs/c", "died"]
    assert json.loads(show("--json").stdout)[0]["differs"]["optimizer.lr.value"] == "0.2"
    assert "lr" not in show("runs/a", "runs/c").stdout.split()


def test_what_differs_between_placements_of_one_recipe(folder: Path) -> None:
    config(run_folder(folder, "a", {**STARTED, "time": 50.0}), "placement.processes=2")
    ran = {**STARTED, "strategy": "zero3", "processes": 4}
    config(run_folder(folder, "b", ran), "placement.strategy=fastest", "recipe.seed=1")
    head, b, a, _ = show().stdout.splitlines()
    assert head.split()[:6] == ["run", "state", "step", "strategy", "processes", "seed"]
    assert (b.split()[3:6], a.split()[3:6]) == (["zero3", "4", "1"], ["auto", "2", "0"])
    differs = {each["run"]: each["differs"] for each in json.loads(show("--json").stdout)}
    assert differs["runs/a"] == {"seed": "0", "placement.strategy.name": "auto", "placement.processes": "2"}


def test_a_recipe_that_cannot_be_read_is_not_compared(folder: Path) -> None:
    config(run_folder(folder, "a", STARTED))
    for name, text in (("b", "recipe: 1"), ("c", "recipe: {seed: *x"), ("d", "recipe: {'\x9b': 1}")):
        (run_folder(folder, name, STARTED) / "config.yaml").write_text(text, encoding="utf-8")
    found = show()
    assert "\x9b" not in found.stdout


def test_why_a_run_failed(folder: Path) -> None:
    failed = {"event": "failed", "time": 1.0, "exit_code": 1, "reason": "loss is nan at step 2\x1b[2J"}
    for name, events in (("bad", [STARTED]), ("done", [STARTED, DONE])):
        (run_folder(folder, name, *events) / "result.json").write_text(json.dumps(failed), encoding="utf-8")
    (run_folder(folder, "odd", STARTED) / "result.json").write_text('{"event": "failed", "reason": [1]}')
    *_, bad, odd = show().stdout.splitlines()
    assert bad == "runs/bad failed: loss is nan at step 2\\x1b[2J"
    assert odd.startswith("runs/odd ended without recording a reason")
    assert states() == {"runs/bad": "failed", "runs/done": "done", "runs/odd": "died"}
    failures = {each["run"]: each["failure"] for each in json.loads(show("--json").stdout)}
    assert failures == {"runs/bad": "loss is nan at step 2\\x1b[2J", "runs/done": None, "runs/odd": None}


@pytest.mark.parametrize(
    ("cause", "state", "why"),
    [
        ("data", "failed", "failed: train.bin: not found"),
        ("transient", "saved", "stopped by SIGTERM; start it again to resume"),  # a scheduler starts it again
    ],
)
def test_a_saved_run_whose_next_start_failed_has_the_reason_of_that_start(
    folder: Path, cause: str, state: str, why: str
) -> None:
    failed = {"event": "failed", "time": 120.0, "exit_code": 1, "reason": "train.bin: not found", "cause": cause}
    (run_folder(folder, "a", STARTED, STEP, STOPPED) / "result.json").write_text(json.dumps(failed), encoding="utf-8")
    assert show().stdout.splitlines()[-1] == f"runs/a {why}"
    assert states() == {"runs/a": state}


@pytest.mark.parametrize(
    ("tail", "problem"),
    [
        ("{]\n", "warning: runs/bad/events.jsonl:2: not JSON"),
        ("[1]\n", "warning: runs/bad/events.jsonl:2: not an event"),
        (
            '{"event": "step"}\n',
            "warning: runs/bad/events.jsonl: was not written by this version of Lockstep (KeyError('loss')); use the "
            "version that wrote it",
        ),
        ("\xff\n", "warning: runs/bad/events.jsonl:2: not JSON"),
        ("[" * 100_000 + "\n", "warning: runs/bad/events.jsonl:2: not JSON"),
        ("1" * 2_000_000, "warning: runs/bad/events.jsonl:2: a line of more than 1,048,576 bytes"),
    ],
)
def test_a_damaged_log_is_said_and_the_others_are_shown(folder: Path, tail: str, problem: str) -> None:
    run_folder(folder, "bad", STARTED, tail=tail)
    run_folder(folder, "good", STARTED, DONE)
    assert states() == {"runs/good": "done", "runs/bad": "unreadable"}
    assert show().stderr.startswith(problem)


FORGED = [
    {**base, key: value}
    for base in (STARTED, STEP, STOPPED, DONE, {"event": "evaluated", "time": 1.0, "step": 1, "top1": 0.5})
    for key in base
    for value in ("text", [1], {"a": 1}, True, -1, 10**400, float("nan"), float("inf"), 1e300, None)
]


def test_a_log_of_wrong_types_is_one_line(folder: Path) -> None:
    """Each figure of each event as each wrong thing: either it is none of those that are shown, or the log is refused.

    31 of these 250 logs ended in a traceback once.
    """
    for number, event in enumerate(FORGED):
        run_folder(folder, f"{number}", STARTED, event)
    run_folder(folder, "good", STARTED, DONE)
    assert states()["runs/good"] == "done"
    found = show()
    lines = found.stdout.splitlines()
    table, ends = lines[: len(FORGED) + 2], lines[len(FORGED) + 2 :]
    assert all(line.startswith("runs/") for line in table[1:])
    [silent] = [line for line in ends if "reason" in line]
    assert silent.count("runs/") == 5
    assert " more ended without recording a reason" in silent
    assert len(found.stderr.splitlines()) == found.stdout.count("unreadable")
    assert found.stderr.count("was not written by this version of Lockstep") > 100


@pytest.mark.parametrize("name", ["events.jsonl", "job.json", "lock"])
@pytest.mark.parametrize("planted", ["link", "pipe", "device", "folder"])
def test_what_is_no_plain_file_is_not_read(folder: Path, name: str, planted: str) -> None:
    path = run_folder(folder, "odd", STARTED) / name
    path.unlink(missing_ok=True)
    if planted == "pipe":
        os.mkfifo(path)
    elif planted == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if planted == "device" else "nowhere")
    run_folder(folder, "good", STARTED, DONE)
    found = states()
    assert found == {"runs/odd": "died" if name == "lock" else "unreadable", "runs/good": "done"}


def test_names_and_reasons_of_others_move_no_cursor(folder: Path) -> None:
    run_folder(folder, "\x1b[2Jname\r", {**STARTED, "event": "\x1b[31mlast"})
    died = run_folder(folder, "b", STARTED)
    (died / "result.json").write_text(json.dumps({"event": "failed", "reason": "\x1b[2J\nso"}), encoding="utf-8")
    run_folder(folder, "c\x1b]0;title\x07", tail="{]\n")
    found = show()
    text = found.stdout + found.stderr
    assert not set(text) & set(map(chr, [*range(10), *range(11, 32), *range(127, 160)]))
    assert "runs/\\x1b[2Jname\\r" in text
    assert r"warning: runs/c\x1b]0;title\x07/events.jsonl:1: not JSON" in text


def test_a_damaged_record_of_a_job_is_said(folder: Path) -> None:
    (run_folder(folder, "a", STARTED) / "job.json").write_text('{"job": ', encoding="utf-8")
    found = show()
    assert "unreadable" in found.stdout
    assert found.stderr.startswith("warning: runs/a/job.json: cannot be read")


def test_folders_without_runs(folder: Path) -> None:
    told = "error: runs: no such folder; pass a run folder, or a folder that contains run folders\n"
    assert show("runs", code=2).stderr == told
    assert show().stdout == "no runs yet: folder runs does not exist; pass the folder of your runs\n"
    assert json.loads(show("--json").stdout) == []
    (folder / "runs" / "empty").mkdir(parents=True)
    assert show().stdout == "no runs in runs\n"
    assert json.loads(show("--json").stdout) == []


def test_runs_are_found_by_name_and_in_folders_of_folders(folder: Path) -> None:
    run = run_folder(folder, "nested/deeper/a", STARTED)
    (run / "checkpoints").mkdir()
    for place in ("runs", "runs/nested/deeper/a", "."):
        assert "nested/deeper/a" in show(place).stdout


def test_what_slurm_says(folder: Path) -> None:
    run_folder(folder, "waits", job=7)
    run_folder(folder, "again", STARTED, STEP, STOPPED, job=8)
    run_folder(folder, "gone", job=9)
    squeue(folder, "echo \"$@\" > asked; echo '7|PENDING|Priority'; echo '8|PENDING|BeginTime'")
    found = {each["run"]: (each["state"], each["slurm"]) for each in json.loads(show("--json").stdout)}
    assert found == {
        "runs/waits": ("queued", "PENDING (Priority)"),
        "runs/again": ("queued", "PENDING (BeginTime)"),
        "runs/gone": ("died", None),
    }
    assert "--jobs=7,8,9,7,8,9" in (folder / "asked").read_text()


def test_a_queue_that_hangs_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder(folder, "waits", job=7)
    squeue(folder, "exec /bin/sleep 60")
    monkeypatch.setattr(batch, "_SQUEUE_TIMEOUT_S", 0.3)
    began = time.monotonic()
    found = show()
    assert time.monotonic() - began < 5
    assert "queued" in found.stdout
    assert found.stderr.startswith("warning: squeue did not answer within")


def test_a_queue_that_fails_is_said(folder: Path) -> None:
    run_folder(folder, "waits", job=7)
    squeue(folder, "echo no controller >&2; exit 1")
    found = show()
    assert "queued" in found.stdout
    assert found.stderr.endswith("no controller\n")


def test_without_jobs_nobody_is_asked(folder: Path) -> None:
    run_folder(folder, "a", STARTED)
    squeue(folder, "touch asked")
    show()
    assert not (folder / "asked").exists()


def test_it_imports_no_torch(folder: Path) -> None:
    run_folder(folder, "a", STARTED, job=7)
    assert not imported("jobs", folder=folder) & {"torch", "numpy", "pydantic"}


def test_help_explains_each_column_that_its_heading_does_not() -> None:
    text = " ".join(show("--help").stdout.split())
    for column in ("figure is", "loss is", "best marks", "left is", "last is"):
        assert column in text.partition("Columns: ")[2]
