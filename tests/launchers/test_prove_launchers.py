"""The script that compares all launchers and strategies, on the launcher that needs nothing else."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "scripts" / "prove-launchers"
# One layer that knows how many processes there are, as no model should.
MODEL = """
import os
from torch import nn
class Counted(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) * int(os.environ.get("WORLD_SIZE", 1))
def linear(num_classes):
    return nn.Sequential(nn.Flatten(), Counted(64, num_classes))
"""


def prove(
    folder: Path, *words: str, path: str = os.environ["PATH"]
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Return what the script printed, and what it wrote."""
    line = [sys.executable, str(SCRIPT), *words, "--json", str(folder / "rows.json")]
    python = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PATH": path, "PYTHONPATH": python}
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=110)
    return done, json.loads((folder / "rows.json").read_text(encoding="utf-8"))


def test_a_strategy_has_the_weights_of_one_process(tmp_path: Path) -> None:
    done, results = prove(tmp_path, "train", "--strategy", "pipeline", "recipe.steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    first, _, titles, row, _, last = done.stdout.splitlines()
    expected = first.removeprefix("on 1 process: weights sha256 ")
    assert (len(expected), results["sha256"]) == (64, expected)
    assert titles.split() == ["launcher", "component", "strategy", "processes", "hosts", "seconds", "sha256"]
    # The last column but one is the time.
    *columns, _, sha256 = row.split()
    assert [*columns, sha256] == ["train", "lockstep", "0.1.0", "pipeline", "2", "1", expected[:16]]
    assert last.startswith("1 of 1 with the weights of one process")
    assert [(row["processes"], row["hosts"], row["sha256"]) for row in results["rows"]] == [(2, 1, expected)]
    assert results["machine"]["packages"]["torch"]


def test_other_weights_and_launchers_that_are_not_there_are_found(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(MODEL, encoding="utf-8")
    words = ["train", "mpiexec", "--strategy", "ddp", 'recipe.model={name: "counted:linear"}']
    done, results = prove(tmp_path, *words, path=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    departed, missing = results["rows"]
    assert (departed["same"], departed["ended"], len(departed["sha256"])) == (False, "done", 64)
    assert departed["sha256"] != results["sha256"]
    assert (missing["same"], missing["ended"]) == (False, "not found: mpiexec.hydra of MPICH")
    *_, first, second, _, last = done.stdout.splitlines()
    assert first.endswith(f" DIFFERS {departed['sha256']}")
    assert second.endswith(" NONE: not found: mpiexec.hydra of MPICH")
    assert last.startswith("0 of 2 with the weights of one process")


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
