"""Scripts in processes that Lockstep starts: how they ended stands in their run folders."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, signal, lockstep
run = lockstep.join(seed=0, dir="run")
if run.rank:
    signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""


LAUNCH = [sys.executable, "-m", "lockstep", "launch", "--processes-per-node=2", "--", "python", "loop.py"]


def test_a_script_that_ends_itself_has_no_failure(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT.partition("if run.rank")[0] + "run.close()\nraise SystemExit(3)")
    assert subprocess.run(LAUNCH, cwd=tmp_path, check=False, timeout=120).returncode == 3
    assert not (tmp_path / "run/result.json").exists()


def test_a_killed_rank_is_in_the_result_though_it_is_the_one_that_writes(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT)
    assert subprocess.run(LAUNCH, cwd=tmp_path, check=False, timeout=120).returncode == 1
    found = json.loads((tmp_path / "run/result.json").read_text())
    assert (found["event"], found["cause"], found["ranks"]) == ("failed", "transient", [0])
    assert "was killed by SIGKILL" in found["reason"]
