"""The batch script for Slurm: what it says, and what it decides when srun ends."""

import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from component import require

from lockstep.errors import UsageError
from lockstep.launchers import slurm
from lockstep.launchers.batch import BatchJob, check_batch, parse_states, render_script
from lockstep.launchers.job import Job, Resources

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

WORDS = ("train", "digits", "recipe.loss={name: a}")
JOB = Job(WORDS, "/opt/python", nodes=2, processes_per_node=4, options=("--partition=gpu", "--comment=it's a b"))
BATCH = BatchJob(JOB, "digits", "/home/me", "runs/a", "04:00:00", 120)
NASTY = "it's 100%j; $(touch broken) \"#"
STOPPED = '{"event": "stopped", "time": 1.5, "step": 3, "epoch": 0, "samples": 9, "reason": "SIGUSR1"}'


def directives(text: str) -> list[str]:
    """Return the words of all #SBATCH lines, read as Slurm reads them."""
    return [word for line in text.splitlines() if line.startswith("#SBATCH ") for word in shlex.split(line[8:])]


def test_what_slurm_is_told() -> None:
    assert directives(render_script(BATCH)) == [
        "--job-name=digits",
        "--chdir=/home/me",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--time=04:00:00",
        "--output=/home/me/runs/a/logs/slurm-%j.log",
        "--open-mode=append",
        "--signal=USR1@120",
        "--requeue",
        "--partition=gpu",
        "--comment=it's a b",
    ]


def test_what_is_asked_for_stands_in_the_header_for_all_starts_and_not_in_the_step() -> None:
    """Slurm keeps the header of a job that goes back into the queue."""
    job = replace(JOB, resources=Resources("gpu", "physics", "a100:4", 8), options=("--comment=it's a b",))
    text = render_script(check_batch(replace(BATCH, job=job)))
    asked = ["--partition=gpu", "--account=physics", "--gpus-per-node=a100:4", "--cpus-per-task=8"]
    assert [word for word in directives(text) if word in asked] == asked
    assert f"\n{shlex.join(slurm.command(replace(JOB, options=())))}\ncode=$?\n" in text


def test_each_start_draws_a_secret_that_only_the_ranks_see(tmp_path: Path) -> None:
    said = [
        run(tmp_path, render_script(BATCH), srun='echo "$LOCKSTEP_JOB_SECRET"').stdout.splitlines()[-1]
        for _ in range(2)
    ]
    assert all(re.fullmatch("[0-9a-f]{64}", each) for each in said)
    assert said[0] != said[1]
    own = f"export LOCKSTEP_JOB_SECRET=of-my-own-choosing\n{render_script(BATCH)}"
    assert run(tmp_path, own, srun='echo "$LOCKSTEP_JOB_SECRET"').stdout.splitlines()[-1] == "of-my-own-choosing"


def test_what_is_left_out_leaves_no_line() -> None:
    text = render_script(replace(BATCH, time="", job=replace(JOB, options=())))
    assert "--time" not in text
    assert "--option" not in text
    assert "\n\n\n" not in text


@pytest.mark.parametrize("batch", [BATCH, replace(BATCH, restart_args=("run.resume=auto",))])
def test_names_of_any_kind_are_quoted(tmp_path: Path, batch: BatchJob) -> None:
    job = replace(JOB, words=("train", NASTY), options=(f"--comment={NASTY}",))
    text = render_script(replace(batch, job=job, name=NASTY, folder=f"/home/{NASTY}", run=NASTY))
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    found = directives(text)
    assert f"--chdir=/home/{NASTY}" in found
    assert f"--comment={NASTY}" in found
    assert f"--output=/home/{NASTY}/{NASTY}/logs/slurm-%j.log".replace("100%j", "100%%j") in found
    assert run(tmp_path, text, srun='echo "$9" > said; exit 0').returncode == 0
    assert not (tmp_path / "broken").exists()
    assert (tmp_path / "said").read_text().rstrip("\n") == NASTY


def test_a_shell_checker_finds_nothing() -> None:
    require("shellcheck", "shellcheck", "shellcheck")
    for batch in (BATCH, replace(BATCH, restart_args=("run.resume=auto",))):
        done = subprocess.run(["shellcheck", "-"], input=render_script(batch), text=True, capture_output=True)
        assert done.stdout == ""


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("4:00:00", 14_400),
        ("0-2", 7200),
        ("0-2:30", 9000),
        ("0-2:30:7", 9007),
        ("1-12", 129_600),
    ],
)
def test_a_time_as_slurm_writes_it(time: str, seconds: int) -> None:
    just = replace(BATCH, time=time, warn_before_s=min(seconds - 1, 65_535))
    assert check_batch(just) is just
    if seconds <= 65_535:
        with pytest.raises(UsageError, match=f"--warn-before: {seconds} s must be less than --time"):
            check_batch(replace(just, warn_before_s=seconds))


def test_what_cannot_be_is_told_all_at_once() -> None:
    asked = Resources("gpu", "a\nb", gpus_per_node="0")
    job = replace(JOB, options=("--partition=gpu", "--comment=a\nb"), resources=asked)
    with pytest.raises(UsageError) as caught:
        check_batch(replace(BATCH, job=job, time="4h", warn_before_s=0, run="a\nb"))
    assert str(caught.value).splitlines() == [
        "--time: expected minutes, HH:MM:SS, D-HH or D-HH:MM:SS, got 4h",
        "--warn-before: expected 1 to 65535 seconds, got 0",
        "--gpus-per-node: expected a number such as 4, or a100:4, got 0",
        "--partition: also set with --option; remove one of the two",
        "run.dir: contains a line break, which a batch script does not support; remove it",
        "--account: contains a line break, which a batch script does not support; remove it",
        "--option '--comment=a\\nb': contains a line break, which a batch script does not support; remove it",
    ]


def run(
    folder: Path, text: str, srun: str, squeue: str = "exit 1", scontrol: str = "true"
) -> subprocess.CompletedProcess[str]:
    """Run a script in `folder` with programs that stand in for others.

    What scontrol is told is in `asked`, and how long the script meant to sleep in `slept`.
    """
    for name in ("bin", "runs/a"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    programs = {"srun": srun, "squeue": squeue, "scontrol": f'echo "$@" >> asked; {scontrol}'}
    for name, body in (programs | {"sleep": 'echo "$1" >> slept'}).items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    return subprocess.run(["bash"], input=text, cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("code", "last", "queue", "again"),
    [
        (75, STOPPED, "RUNNING N/A", True),  # the warning
        (143, STOPPED, "RUNNING N/A", True),  # srun killed a rank that was about to end
        (75, STOPPED.replace("USR1", "TERM"), "RUNNING N/A", False),
        (75, STOPPED.replace("USR1", "TERM"), "RUNNING 2026-11-21T19:40:01", True),  # preempted
        (130, STOPPED.replace("USR1", "INT"), "RUNNING N/A", False),
        (75, STOPPED, "COMPLETING N/A", False),  # canceled after the warning
        (75, STOPPED.replace("USR1", "TERM"), "COMPLETING N/A", False),  # canceled
        (75, STOPPED.replace("stopped", "saved"), "RUNNING N/A", False),
        (1, '{"event": "step"}', "RUNNING N/A", False),
        (138, "", "RUNNING N/A", False),  # the warning came before training began
        (143, "", "RUNNING 2026-11-21T19:40:01", True),  # preempted before it
        (137, '{"event": "step"}', "RUNNING N/A", False),
        (0, STOPPED, "RUNNING N/A", False),
    ],
)
def test_when_it_goes_back_into_the_queue(tmp_path: Path, code: int, last: str, queue: str, again: bool) -> None:
    events = tmp_path / "runs" / "a" / "events.jsonl"
    events.parent.mkdir(parents=True)
    events.write_text(STOPPED + "\n", encoding="utf-8")  # of the start before
    says = f"echo '{last}' >> runs/a/events.jsonl; " if last else ""
    done = run(tmp_path, render_script(BATCH), f"{says}exit {code}", f"echo '{queue}    '")
    assert done.returncode == code
    assert ("requeued" in done.stdout) == again
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else None) == ("requeue 7\n" if again else None)


# Fails as often as it is told: `exit 1` until there are as many lines in the file.
FAILS = 'echo >> tried; if [ "$(wc -l < tried)" -le {times} ]; then exit 1; fi'
ASKS = "scontrol requeue 7\n"


@pytest.mark.parametrize("reason", ["USR1", "TERM"])
def test_a_slurm_that_does_not_answer_at_once_is_asked_again(tmp_path: Path, reason: str) -> None:
    srun = f"echo '{STOPPED.replace('USR1', reason)}' >> runs/a/events.jsonl; exit 75"
    done = run(tmp_path, render_script(BATCH), srun, f"{FAILS.format(times=3)}; echo RUNNING 2026-11-21T19:40:01")
    assert (done.returncode, (tmp_path / "asked").read_text()) == (75, "requeue 7\n")
    assert (tmp_path / "slept").read_text().split() == ["0", "5", "10", "20"]
    assert not done.stdout.endswith(ASKS)


def test_a_slurm_that_does_not_take_the_job_back_at_once_is_asked_again(tmp_path: Path) -> None:
    srun = f"echo '{STOPPED}' >> runs/a/events.jsonl; exit 75"
    done = run(tmp_path, render_script(BATCH), srun, "echo RUNNING N/A", FAILS.format(times=2))
    assert (done.returncode, (tmp_path / "asked").read_text(), done.stderr) == (75, 3 * "requeue 7\n", "")
    assert not done.stdout.endswith(ASKS)


@pytest.mark.parametrize(("squeue", "scontrol"), [("exit 1", "true"), ("echo RUNNING N/A", "exit 1")])
def test_a_user_whose_slurm_does_not_answer_is_told_what_to_do(tmp_path: Path, squeue: str, scontrol: str) -> None:
    srun = f"echo '{STOPPED}' >> runs/a/events.jsonl; exit 75"
    done = run(tmp_path, render_script(BATCH), srun, squeue, scontrol)
    assert done.returncode == 75
    assert done.stdout.endswith(f"stopped by SIGUSR1 and saved, but Slurm did not requeue it; to continue:\n{ASKS}")
    assert sum(map(int, (tmp_path / "slept").read_text().split())) == 65


def test_only_the_first_start_begins_from_a_checkpoint_elsewhere(tmp_path: Path) -> None:
    batch = replace(BATCH, restart_args=("run.resume=auto",))
    for words in ("", " run.resume=auto"):
        assert run(tmp_path, render_script(batch), 'echo "$@" > said').returncode == 0
        assert (tmp_path / "said").read_text().endswith(f"train digits recipe.loss={{name: a}}{words}\n")
        (tmp_path / "runs" / "a" / "config.yaml").touch()


def test_cores_of_a_task_are_passed_on(tmp_path: Path) -> None:
    text = render_script(BATCH)
    assert run(tmp_path, f"SLURM_CPUS_PER_TASK=3\n{text}", 'echo "$SRUN_CPUS_PER_TASK" > said').returncode == 0
    assert (tmp_path / "said").read_text() == "3\n"


def test_states_in_the_queue() -> None:
    assert parse_states("12|RUNNING|None\n13|PENDING|BeginTime\nrubbish\n\n") == {
        12: ("RUNNING", ""),
        13: ("PENDING", "BeginTime"),
    }
