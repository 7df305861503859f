"""Every kind of fault of scripts/faults.py befalls one run, which ends as if nothing had happened; no process is left.

The proof with figures is `scripts/prove-faults`, of a run for each and of a soak; here is one of each but the longest.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from component import require, require_etcd, require_hosts, require_slurm
from waiting import until

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
sys.path.append(str(SCRIPTS))

import faults  # noqa: E402

# How soon a user may expect to hear of it, in seconds; generous, as other tests may run beside. Others say nothing.
HEARD_S = {"worker-killed": 10, "rank-by-hand-killed": 15, "link-cut": 30, "host-killed": 30, "out-of-memory": 60}


def require_all() -> None:
    require_hosts()
    require_etcd()
    require_slurm()
    require("faketime", "faketime", "faketime")
    require("hosts", "openssh-server openssh-client", "sshd", "ssh", "ssh-keygen")


def proved(folder: Path, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    """Run the proof; return its exit code, the figures of each fault, and what it printed."""
    figures = folder / "figures.json"
    line = [SCRIPTS / "prove-faults", *words, "--json", figures]
    done = subprocess.run(line, cwd=folder, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True)
    rows = json.loads(figures.read_text(encoding="utf-8"))["faults"] if figures.exists() else []
    return done.returncode, rows, done.stdout + done.stderr


@pytest.fixture(scope="module")
def run_of_all(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[dict[str, Any]], str]:
    """Return the proof of one run that every kind of fault befell, one after the other."""
    require_all()
    return proved(tmp_path_factory.mktemp("faults"), "--each")


@pytest.mark.timeout(1800)
def test_a_run_that_all_of_them_befell_ends_as_the_undisturbed_one(run_of_all: Any) -> None:
    code, rows, said = run_of_all
    assert code == 0, said
    assert [row["fault"] for row in rows] == [name for name in faults.KINDS if name not in faults.LONG]
    assert {(row["same"], len(row["sha256"])) for row in rows} == {(True, 64)}
    assert said.count("; by itself: scripts/prove-faults ") == len(rows)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in faults.KINDS if name not in faults.LONG])
def test_the_user_hears_of_it_and_no_process_is_left(run_of_all: Any, name: str) -> None:
    [row] = [row for row in run_of_all[1] if row["fault"] == name]
    assert row["survivors"] == []
    assert row["told"]
    if name in HEARD_S:
        assert row["detected_s"] < HEARD_S[name], row


@pytest.mark.timeout(200)
def test_a_fault_can_be_had_by_itself(tmp_path: Path) -> None:
    require_all()
    code, rows, said = proved(tmp_path, "bit-flipped", "--seed", "3")
    assert code == 0, said
    assert [(row["fault"], row["seed"], row["same"]) for row in rows] == [("bit-flipped", 3, True)]
    assert "warning: run/checkpoints/step-" in said


@pytest.mark.timeout(400)
def test_other_losses_and_processes_that_stay_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof itself: a loss that is not that of the undisturbed run, and a process that does not end."""
    run = faults.Run(tmp_path / "run", 8)
    job = run.start(["sleep", "1000"])
    until(lambda: faults._marked(run.mark), 10)  # a process has its environment a moment after it has begun
    assert run.survivors(patience_s=0.2) == [job.process.pid]
    job.wait()
    (run.folder / "run").mkdir()
    line = {"event": "step", "step": 1, "loss": 2.5, "time": 1.0}
    (run.folder / "run" / "events.jsonl").write_text(json.dumps(line) + "\n" + '{"half', encoding="utf-8")
    assert run.events() == [line]
    assert (run.done, run.is_done, run.survivors(0.2)) == (1, False, [])
