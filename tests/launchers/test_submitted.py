"""Jobs of `lockstep submit` in a real Slurm: stopped in every way that sites stop them, they lose nothing."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import small
from cluster import Run, slurm
from waiting import until

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

LOCKSTEP = (sys.executable, "-m", "lockstep")
PATIENCE_S = 300.0  # for processes that import torch at once, seven of them on cores that other tests use too
# One process submits them all: each would have to import torch.
SUBMIT = """
import sys
from lockstep.cli import main
for line in sys.argv[1].splitlines():
    main(["submit", "--time=10", *line.split("|")], standalone_mode=False)
"""
# What the runs are called, where they run, and how each is stopped while it trains.
PLACES = {
    "warned": ["--nodes=2"],
    "canceled": ["--nodes=2"],
    "put back": [],
    "given way": ["--option=--cpus-per-task=2", "--option=--partition=spare"],  # now no node has two cores left
    "killed": ["--nodes=2", "--python=./sleeper"],  # not at once
}
STOPS = {
    "given way": "sbatch --ntasks=2 --nodes=1 --output=other-%j --wrap true",  # a job that needs its place
    "warned": "scancel --signal=USR1 {job}",  # as Slurm does before the time is over
    "put back": "scontrol requeue {job}",  # by an administrator, say
    "canceled": "scancel {job}",
}
STEPS = 300


@dataclass(frozen=True)
class Seen:
    """What `lockstep jobs` said of each run while it waited, trained, was stopped, and in the end."""

    folder: Path
    queued: dict[str, dict[str, Any]]
    running: dict[str, dict[str, Any]]
    stopped: dict[str, dict[str, Any]]
    end: dict[str, dict[str, Any]]
    processes: str

    def events(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name / "events.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "it's 100%j"  # what has to be quoted everywhere
    folder.mkdir()
    small.write(folder, STEPS, pace_s=0.1)
    (folder / "sleeper").write_text("#!/bin/sh\nexec sleep 1000\n", encoding="utf-8")
    (folder / "sleeper").chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def beside_slurm(folder: Path) -> Iterator[Run]:
    with slurm(folder) as run:
        yield run


def jobs(run: Run) -> dict[str, dict[str, Any]]:
    return {each["run"]: each for each in json.loads(run(*LOCKSTEP, "jobs", ".", "--json"))}


def submit(run: Run, submissions: dict[str, list[str]]) -> None:
    lines = [
        "|".join([*options, "--", "train", "small.yaml", f"run.dir={name}"]) for name, options in submissions.items()
    ]
    run(sys.executable, "-c", SUBMIT, "\n".join(lines))


@pytest.fixture(scope="module")
def seen(folder: Path, beside_slurm: Run) -> Seen:
    """Return what was seen of four jobs, each of which was stopped in its own way."""
    run = beside_slurm

    def said(name: str) -> str:
        log = folder / name / "events.jsonl"
        return log.read_text(encoding="utf-8") if log.exists() else ""

    def stop(*names: str) -> None:
        """Stop some, and look at each when Slurm has taken note."""
        for name in names:
            run(*STOPS[name].format(job=running[name]["job"]).split())

        def seen_all() -> bool:
            time.sleep(0.1)
            queue = dict(line.split("|") for line in run("squeue", "--noheader", "--format=%i|%T").splitlines())
            left = {name: queue.get(str(running[name]["job"])) for name in set(names) - stopped.keys()}
            noted = [name for name, state in left.items() if state == (None if name == "canceled" else "PENDING")]
            found = jobs(run) if noted else {}  # once for all of them: Slurm may begin one again meanwhile
            stopped.update({name: found[name] for name in noted})
            return stopped.keys() >= set(names)

        until(seen_all, PATIENCE_S)

    submit(run, {name: [*options, "--option=--hold"] for name, options in PLACES.items()})
    queued = jobs(run)
    # That which gives way last: were it first, those that come after would take its place at once.
    run("scontrol", "release", ",".join(str(queued[name]["job"]) for name in PLACES if name in STOPS))
    try:
        until(lambda: all(said(name).count('"event": "step"') > 1 for name in STOPS), PATIENCE_S)
    except AssertionError:
        print(run("squeue"), *(log.read_text() for log in folder.rglob("slurm-*.log")), sep="\n")  # who was late
        raise
    running = jobs(run)
    stopped: dict[str, dict[str, Any]] = {}
    stop("given way")  # while the others leave no place
    stop("warned", "put back", "canceled")
    small.pace(folder, 0)
    line = (*LOCKSTEP, "train", "small.yaml", "run.dir=alone", "placement.processes=1")  # the run that nobody stops
    env = {**os.environ, "PYTHONPATH": str(folder)}
    with subprocess.Popen(line, cwd=folder, env=env, stdout=subprocess.PIPE) as alone:
        until(lambda: all('"event": "done"' in said(name) for name in STOPS if name != "canceled"), PATIENCE_S)
        until(lambda: len(run("squeue", "--noheader").splitlines()) == 1, PATIENCE_S)
        alone.communicate()
    return Seen(folder, queued, running, stopped, jobs(run), run("ps", "-e", "-o", "args"))


def test_before_they_begin_they_are_queued(seen: Seen) -> None:
    assert {(each["state"], each["slurm"], each["step"]) for each in seen.queued.values()} == {
        ("queued", "PENDING (JobHeldUser)", None)
    }
    assert len({each["job"] for each in seen.queued.values()}) == len(PLACES)


def test_while_they_train_their_progress_is_seen(seen: Seen) -> None:
    for each in (seen.running[name] for name in STOPS):
        assert (each["state"], each["slurm"], each["steps"]) == ("running", "RUNNING", STEPS)
        # A step of 64 samples takes 0.1 s longer.
        assert 0 < each["samples_per_s"] < 640
        assert each["left_s"] > 0.1 * (STEPS - each["step"])


def test_stopped_they_are_queued_again_except_the_cancelled_one(seen: Seen) -> None:
    stopped = {name: each for name, each in seen.stopped.items() if name != "canceled"}
    states = {(each["state"], each["slurm"].split()[0]) for each in stopped.values()}
    # Slurm may have begun one again by the time that it is looked at.
    assert ("queued", "PENDING") in states <= {("queued", "PENDING"), ("running", "RUNNING")}
    assert all(0 < each["step"] < STEPS for each in stopped.values())
    assert (seen.stopped["canceled"]["state"], seen.stopped["canceled"]["slurm"]) == ("saved", None)


@pytest.mark.parametrize(("name", "reason"), [("warned", "SIGUSR1"), ("put back", "SIGTERM"), ("given way", "SIGTERM")])
def test_they_go_on_by_themselves_and_lose_nothing(seen: Seen, name: str, reason: str) -> None:
    events = seen.events(name)
    assert [each["event"] for each in events if each["event"] != "step"] == [
        "started",
        "saved",
        "stopped",
        "started",
        "evaluated",
        "saved",
        "done",
    ]
    assert [each["step"] for each in events if each["event"] == "step"] == list(range(1, STEPS + 1))
    [stopped] = [each for each in events if each["event"] == "stopped"]
    assert stopped["reason"] == reason
    assert events[-1]["weights_sha256"] == seen.events("alone")[-1]["weights_sha256"]
    assert (seen.end[name]["state"], seen.end[name]["step"]) == ("done", STEPS)


def test_a_log_of_the_job_is_added_to(seen: Seen) -> None:
    job = seen.end["warned"]["job"]
    said = (seen.folder / "warned" / "logs" / f"slurm-{job}.log").read_text(encoding="utf-8")
    assert f"job {job}, start 1, on n[1-2]" in said
    assert f"job {job}, start 2, on n[1-2]" in said
    assert said.count("stopped by SIGUSR1 and saved: requeued") == 1


def test_cancelled_it_is_saved_and_stays_so(seen: Seen) -> None:
    assert seen.events("canceled")[-1]["event"] == "stopped"
    assert (seen.end["canceled"]["state"], seen.end["canceled"]["slurm"]) == ("saved", None)


def test_no_process_is_left(seen: Seen) -> None:
    assert "slurmctld" in seen.processes
    assert "lockstep" not in seen.processes


def test_a_killed_srun_ends_its_job_and_its_tasks(beside_slurm: Run, seen: Seen) -> None:
    run, job = beside_slurm, str(seen.queued["killed"]["job"])
    run("scontrol", "release", job)
    until(lambda: run("ps", "-e", "-o", "args").count("sleep 1000") == 2, PATIENCE_S)
    run("pkill", "-KILL", "-x", "srun")  # both of its processes
    until(lambda: not run("squeue", "--noheader"), PATIENCE_S)
    assert "sleep 1000" not in run("ps", "-e", "-o", "args")
    assert "ExitCode=137:0" in run("scontrol", "show", "job", job)
    assert jobs(run)["killed"]["state"] == "died"
