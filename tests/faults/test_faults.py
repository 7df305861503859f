"""Faults of scripts/faults.py befall a run, which ends as if nothing had happened; no process is left.

The proof with figures is `scripts/prove-faults`, of a run for each and of a soak.
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

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
sys.path.append(str(SCRIPTS))

import faults  # noqa: E402

# How soon a user may expect to hear of it, in seconds; generous, as other tests may run beside. Others say nothing.
HEARD_S = {"worker-killed": 10, "rank-by-hand-killed": 15, "link-cut": 30, "host-killed": 30, "out-of-memory": 60}

Proof = tuple[int, list[dict[str, Any]], str]  # its exit code, the figures of each fault, and what it printed

# A few faults befall one run: each run takes minutes, and scripts/test may leave out some of them.
KINDS = [name for name in faults.KINDS if name not in faults.LONG]
TOGETHER = [KINDS[first : first + 4] for first in range(0, len(KINDS), 4)]


def require_all() -> None:
    require_hosts()
    require_etcd()
    require_slurm()
    require("faketime", "faketime", "faketime")
    require("hosts", "openssh-server openssh-client", "sshd", "ssh", "ssh-keygen")


def proved(folder: Path, *words: str) -> Proof:
    """Run the proof."""
    figures = folder / "figures.json"
    line = [SCRIPTS / "prove-faults", *words, "--json", figures]
    done = subprocess.run(line, cwd=folder, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True)
    rows = json.loads(figures.read_text(encoding="utf-8"))["faults"] if figures.exists() else []
    return done.returncode, rows, done.stdout + done.stderr


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("names", TOGETHER, ids=", ".join)
def test_a_run_that_they_befell_ends_as_the_undisturbed_one_and_the_user_hears_of_each(
    tmp_path: Path, names: list[str]
) -> None:
    require_all()
    code, rows, said = proved(tmp_path, "--each", *names)
    assert code == 0, said
    assert {row["fault"] for row in rows} == {*names}
    assert {(row["same"], len(row["sha256"])) for row in rows} == {(True, 64)}
    assert said.count("; by itself: scripts/prove-faults ") == len(rows)
    for row in rows:
        assert row["survivors"] == [], row
        assert row["told"], row
        assert row["fault"] not in HEARD_S or row["detected_s"] < HEARD_S[row["fault"]], row


def test_a_fault_can_be_had_by_itself(tmp_path: Path) -> None:
    require_all()
    code, rows, said = proved(tmp_path, "bit-flipped", "--seed", "3")
    assert code == 0, said
    assert [(row["fault"], row["seed"], row["same"]) for row in rows] == [("bit-flipped", 3, True)]
    assert "warning: run/checkpoints/step-" in said


def test_other_losses_and_processes_that_stay_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof itself: a loss that is not that of the undisturbed run, and a process that does not end."""
    run = faults.Run(tmp_path / "run", 8)
    job = run.start(["sleep", "1000"])
    until(lambda: faults._marked(run.mark))  # a process has its environment a moment after it has begun
    assert run.survivors(patience_s=0.2) == [job.process.pid]
    job.wait()
    (run.folder / "run").mkdir()
    line = {"event": "step", "step": 1, "loss": 2.5, "time": 1.0}
    (run.folder / "run" / "events.jsonl").write_text(json.dumps(line) + "\n" + '{"half', encoding="utf-8")
    assert run.events() == [line]
    assert (run.done, run.is_done, run.survivors(0.2)) == (1, False, [])
