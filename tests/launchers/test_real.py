"""Slurm, Open MPI and Hydra themselves: who is who, and the same bits as one process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small
from component import require, require_slurm

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

ROOT = Path(__file__).parent.parent.parent
LOCKSTEP = f"{sys.executable} -m lockstep"
DOCTOR = f"{LOCKSTEP} doctor launch --device cpu --json"
TRAIN = f"{LOCKSTEP} train small.yaml"
# What Slurm is asked to do, all of it within one start of it: each task has a file for what it says.
SLURM = f"""
set -e
srun -N2 -n4 -o block-%t {DOCTOR}
srun -N2 -n4 -m cyclic -o cyclic-%t {DOCTOR}
printf 'n2\\nn1\\nn2\\n' > hosts
SLURM_HOSTFILE=hosts srun -n3 -m arbitrary -o arbitrary-%t {DOCTOR} || echo $? > refused
srun -N1 -n1 -o alone-%t {DOCTOR}
printf '#!/bin/sh\\n{DOCTOR} > batch-0\\nsrun -N2 -n2 -o step-%%t {DOCTOR}\\n' > script
sbatch -W -N2 -n4 script
{LOCKSTEP} launch --on slurm --nodes 2 -- {TRAIN.removeprefix(LOCKSTEP)} run.dir=slurm > train
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and a recipe, where all is run."""
    folder = tmp_path_factory.mktemp("real")
    small.write(folder, 3)
    return folder


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "PYTHONPATH": f"{folder}",
        "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def reference(folder: Path) -> str:
    """Return the hash of the run by one process."""
    return sha256(run(folder, *TRAIN.split(), "run.dir=reference", "placement.processes=1").stdout)


@pytest.fixture(scope="module")
def slurm(folder: Path) -> Path:
    """Return the folder, after Slurm did all of the above."""
    require_slurm()
    run(folder, str(ROOT / "scripts" / "with-slurm"), "bash", "-c", SLURM)
    return folder


def sha256(out: str) -> str:
    [line] = [line for line in out.splitlines() if line.startswith("weights sha256 ")]
    return line


def tasks(folder: Path, step: str) -> list[dict[str, Any]]:
    """Return what the doctor said in each task of a step, by rank."""
    return said("".join(file.read_text(encoding="utf-8") for file in folder.glob(f"{step}-*")))


def said(text: str) -> list[dict[str, Any]]:
    """Return what the doctor found in each process, one line each, by rank."""
    found = [_facts(json.loads(line)) for line in text.splitlines()]
    return sorted(found, key=lambda each: each["rank"]["rank"] if each["rank"] else 0)


def _facts(report: dict[str, Any]) -> dict[str, Any]:
    texts = {each["check"]: each["found"] for each in report["findings"]}
    problems = [each["found"] for each in report["findings"] if each["level"] == "problem"]
    return {**report["facts"][0], "meet": texts.get("rendezvous"), "problems": problems}


def places(found: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [tuple(each["rank"][name] for name in ("rank", "local_rank", "local_size")) for each in found]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("block", [(0, 0, 3), (1, 1, 3), (2, 2, 3), (3, 0, 1)]),
        ("cyclic", [(0, 0, 3), (1, 0, 1), (2, 1, 3), (3, 2, 3)]),
    ],
)
def test_layouts_of_slurm(slurm: Path, layout: str, expected: list[tuple[int, int, int]]) -> None:
    found = tasks(slurm, layout)
    assert places(found) == expected
    assert {(each["decides"], each["rank"]["master"], each["rank"]["size"]) for each in found} == {("slurm", "n1", 4)}
    assert len({each["rank"]["port"] for each in found}) == 1
    assert found[0]["meet"].endswith(", where this rank listens: free")


def test_rank_0_on_another_host_than_the_first_is_refused_on_all(slurm: Path) -> None:
    found = tasks(slurm, "arbitrary")
    assert len(found) == 3
    assert all("rank 0 is not on the first host of n[1-2]" in each["problems"][0] for each in found)
    assert (slurm / "refused").read_text(encoding="utf-8") == "2\n"


@pytest.mark.parametrize("place", ["alone", "batch"])
def test_one_task_and_a_batch_script_are_no_launch(slurm: Path, place: str) -> None:
    [found] = tasks(slurm, place)
    assert (found["decides"], found["rank"], found["problems"]) == (None, None, [])


def test_a_step_of_a_batch_script_is_one(slurm: Path) -> None:
    assert places(tasks(slurm, "step")) == [(0, 0, 1), (1, 0, 1)]


def test_slurm_trains_to_the_same_bits(slurm: Path, reference: str) -> None:
    assert sha256((slurm / "train").read_text(encoding="utf-8")) == reference


def test_open_mpi(folder: Path, reference: str) -> None:
    program = shutil.which("mpirun.openmpi") or "mpirun"  # Debian may have MPICH's beside it
    require("openmpi", "openmpi-bin", program, "ompi_info")
    (folder / "bin").mkdir()
    (folder / "bin" / "mpirun").symlink_to(shutil.which(program) or program)
    found = said(run(folder, "mpirun", "--oversubscribe", "-n", "3", *DOCTOR.split()).stdout)
    assert places(found) == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]
    assert {(each["decides"], each["rank"]["master"]) for each in found} == {("openmpi", "127.0.0.1")}
    assert len({each["rank"]["port"] for each in found}) == 1
    words = TRAIN.removeprefix(LOCKSTEP).split()
    line = f"{LOCKSTEP} launch --on openmpi --processes-per-node 2 --".split()
    assert sha256(run(folder, *line, *words, "run.dir=openmpi").stdout) == reference


def test_mpich(folder: Path) -> None:
    require("mpich", "mpich", "mpiexec.hydra")
    found = said(run(folder, "mpiexec.hydra", "-n", "3", *DOCTOR.split()).stdout)
    assert places(found) == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]
    assert {(each["decides"], each["rank"]["master"]) for each in found} == {("mpich", "127.0.0.1")}
