"""Cards that Slurm gives to a job reach the ranks, however they are asked for."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Run, slurm

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

LOCKSTEP = (sys.executable, "-m", "lockstep")
# In the place of Python: says which task it is and which cards it sees.
SHOW = """#!/bin/sh
echo "task $SLURM_PROCID sees [$CUDA_VISIBLE_DEVICES] has $SLURM_CPUS_PER_TASK"
"""
ALL_OF_THE_NODE = [f"task {task} sees [0,1] has 2" for task in range(4)]
ONE_EACH = [f"task {task} sees [{task % 2}] has 2" for task in range(4)]
ASKED = ("--nodes=2", "--processes-per-node=2", "--cpus-per-task=2", "--python=./show")
SUBMITTED = pytest.mark.slow("submitted ranks see them too, and so do launched ones that are bound to cards")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("cards")
    show = folder / "show"
    show.write_text(SHOW)
    show.chmod(0o755)
    with slurm(folder) as beside:
        yield beside


def tasks(text: str) -> list[str]:
    return sorted(re.findall(r"task \d sees .*", text))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(["--gpus-per-node=2"], ALL_OF_THE_NODE, marks=SUBMITTED),
        pytest.param(["--option=--gpus-per-task=1"], ONE_EACH, marks=SUBMITTED),
        (["--gpus-per-node=2", "--option=--gpu-bind=single:1"], ONE_EACH),
        ([], [f"task {task} sees [] has 2" for task in range(4)]),
    ],
)
def test_launched_ranks_see_them(run: Run, words: list[str], expected: list[str]) -> None:
    assert tasks(run(*LOCKSTEP, "launch", "--on=slurm", *ASKED, *words, "--", "train", "digits")) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--gpus-per-node=2"], ALL_OF_THE_NODE), (["--option=--gpus-per-task=1"], ONE_EACH)],
)
def test_submitted_ranks_see_them(run: Run, tmp_path: Path, words: list[str], expected: list[str]) -> None:
    """The step inherits the cards of the job, without being told of them again."""
    folder = tmp_path / "run"
    line = ["submit", "--time=5", "--option=--wait", *ASKED, *words, "--", "train", "digits", f"run.dir={folder}"]
    run(*LOCKSTEP, *line)
    [log] = (folder / "logs").glob("slurm-*.log")
    assert tasks(log.read_text()) == expected
