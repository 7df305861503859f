"""Every kind of fault of scripts/faults.py, once: the run ends as if nothing had happened, and no process is left.

A proof with figures is `scripts/prove-faults`, of all of them and of a soak; here is one seed of each but the longest.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
sys.path += [str(SCRIPTS), str(SCRIPTS.parent / "tests" / "launchers")]

import faults  # noqa: E402
from component import require, require_etcd, require_hosts, require_slurm  # noqa: E402

# How soon a user may expect to hear of it, in seconds; generous, as other tests may run beside. Others say nothing.
HEARD_S = {"worker-killed": 10, "rank-by-hand-killed": 15, "link-cut": 30, "host-killed": 30, "out-of-memory": 60}


@pytest.fixture(autouse=True)
def components() -> None:
    require_hosts()
    require_etcd()
    require_slurm()
    require("faketime", "faketime", "faketime")


def proved(folder: Path, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    """Run the proof; return its exit code, the figures of each fault, and what it printed."""
    figures = folder / "figures.json"
    line = [SCRIPTS / "prove-faults", *words, "--json", figures]
    done = subprocess.run(line, cwd=folder, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True)
    rows = json.loads(figures.read_text(encoding="utf-8"))["faults"] if figures.exists() else []
    return done.returncode, rows, done.stdout + done.stderr


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name in faults.KINDS if name not in faults.LONG])
def test_a_run_survives(name: str, tmp_path: Path) -> None:
    code, rows, said = proved(tmp_path, name)
    assert code == 0, said
    [row] = rows
    assert (row["fault"], row["same"], row["survivors"]) == (name, True, [])
    assert row["told"]
    if name in HEARD_S:
        assert row["detected_s"] < HEARD_S[name], said


@pytest.mark.timeout(400)
def test_one_run_survives_several(tmp_path: Path) -> None:
    code, rows, said = proved(tmp_path, "--soak", "3", "worker-killed", "bit-flipped", "asked-to-stop")
    assert code == 0, said
    assert [row["seed"] for row in rows] == [0, 1, 2]
    assert len({row["sha256"] for row in rows}) == 1
    assert said.count("by itself: scripts/prove-faults ") == 3


@pytest.mark.timeout(400)
def test_other_losses_and_processes_that_stay_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof itself: a loss that is not that of the undisturbed run, and a process that does not end."""
    run = faults.Run(tmp_path / "run", 8)
    job = run.start(["sleep", "1000"])
    assert run.survivors(patience_s=0.2) == [job.process.pid]
    job.wait()
    (run.folder / "run").mkdir()
    line = {"event": "step", "step": 1, "loss": 2.5, "time": 1.0}
    (run.folder / "run" / "events.jsonl").write_text(json.dumps(line) + "\n" + '{"half', encoding="utf-8")
    assert run.events() == [line]
    assert (run.done, run.is_done, run.survivors(0.2)) == (1, False, [])
