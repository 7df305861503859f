"""The script that compares all launchers and strategies, on the launcher that needs nothing else."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

SCRIPT = Path(__file__).parents[2] / "scripts" / "prove-launchers"
# Its last layer knows one of the strategies, as no model should.
MODEL = """
import sys
from torch import nn
class Knowing(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) * (1 + ("placement.strategy=ddp" in sys.argv))
def layers(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), Knowing(32, num_classes))
"""


@pytest.mark.slow("test_real.py and commands/test_strategies_train.py compare the same commands with one process")
def test_weights_are_those_of_one_process_or_others_and_a_launcher_is_missing(tmp_path: Path) -> None:
    (tmp_path / "knowing.py").write_text(MODEL, encoding="utf-8")
    words = ["train", "mpiexec", "--strategy", "pipeline", "--strategy", "ddp", 'recipe.model={name: "knowing:layers"}']
    python = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": python}  # there is no mpiexec in it
    line = [sys.executable, str(SCRIPT), *words, "recipe.steps=2", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    results = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    first, _, titles, same, differs, missing, _, _, last = done.stdout.splitlines()
    expected = first.removeprefix("on 1 process: weights sha256 ")
    assert (len(expected), results["sha256"]) == (64, expected)
    assert titles.split() == ["launcher", "component", "strategy", "processes", "hosts", "seconds", "sha256"]
    # The last column but one is the time.
    *columns, _, sha256 = same.split()
    assert [*columns, sha256] == ["train", "lockstep", lockstep.__version__, "pipeline", "2", "1", expected[:16]]
    assert last.startswith("1 of 4 with the weights of one process")
    by_pipeline, by_ddp, without, _ = results["rows"]
    assert (by_pipeline["processes"], by_pipeline["hosts"], by_pipeline["sha256"]) == (2, 1, expected)
    assert (by_ddp["same"], by_ddp["ended"], len(by_ddp["sha256"])) == (False, "done", 64)
    assert by_ddp["sha256"] != expected
    assert differs.endswith(f" DIFFERS {by_ddp['sha256']}")
    assert (without["same"], without["ended"]) == (False, "not found: mpiexec.hydra of MPICH")
    assert missing.endswith(" NONE: not found: mpiexec.hydra of MPICH")
    assert results["machine"]["packages"]["torch"]


def test_a_rank_without_a_log_of_its_own_is_found(tmp_path: Path) -> None:
    unlogged = runpy.run_path(str(SCRIPT))["unlogged"]
    assert unlogged(tmp_path, 2) == "no log of its own has rank 0, 1"
    for rank in range(2):
        (tmp_path / f"rank-{rank}.log").write_text(f"rank {rank} of 2  local rank {rank}  host a\nmore\n")
    assert unlogged(tmp_path, 2) == ""
    (tmp_path / "rank-1.log").write_text("rank 0 of 2  local rank 0  host a\n")
    assert unlogged(tmp_path, 2) == "no log of its own has rank 1"
    (tmp_path / "rank-1.log").write_text("")
    assert unlogged(tmp_path, 2) == "no log of its own has rank 1"
