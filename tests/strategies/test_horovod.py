"""Horovod itself: under its own launcher, under ours, and with a rank that is killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from component import require_package

from lockstep.errors import UsageError
from lockstep.strategies import horovod

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

RUN = ("train", "digits", "recipe.microbatches=4", "placement.device=cpu", "run.tensorboard=false")
FEW = ("recipe.steps=6", "recipe.epochs=null")


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    require_package("horovod")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    try:
        out, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == code, out
    return out


def sha256(out: str) -> str:
    found = re.search(r"weights sha256 (\w{64})", out)
    assert found, out
    return found[1]


def lockstep(*words: str) -> list[str]:
    return [sys.executable, "-m", "lockstep", *words]


def test_two_ranks_by_horovodrun_add_as_one_process_does(tmp_path: Path) -> None:
    """With two there is one addition, and it does not matter which comes first."""
    train = lockstep(*RUN, *FEW, "placement.strategy=horovod")
    by_horovodrun = ended(start(tmp_path, "horovodrun", "--gloo", "-np", "2", *train, "run.dir=launched"))
    assert "rank 1 of 2" in by_horovodrun
    alone = ended(start(tmp_path, *lockstep(*RUN, *FEW, "placement.processes=1", "run.dir=alone")))
    assert sha256(by_horovodrun) == sha256(alone)


OWN = """
from torch import nn


class Wide(nn.Sequential):
    def forward(self, images):
        return super().forward(images.double())


def net(num_classes):
    return Wide(nn.Flatten(), nn.Linear(64, 37), nn.ReLU(), nn.Linear(37, num_classes)).double()
"""


@pytest.mark.slow("two ranks add to the bit above, and comm/test_comm_horovod.py has what is added")
def test_in_float64_three_ranks_are_one_process_but_for_rounding(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    words = ("recipe.model=own:net", "recipe.microbatches=6", "placement.device=cpu", "placement.processes=3")
    verify = lockstep("verify", "digits", *words, "placement.strategy=horovod", "--json", "found.json")
    ended(start(tmp_path, *verify))
    [row] = [row for row in json.loads((tmp_path / "found.json").read_text())["rows"] if row["strategy"] == "horovod"]
    assert row["verdict"] in ("identical", "within tolerance")
    assert (row["largest"] or 0.0) < 1e-10


def test_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    words = ("placement.processes=2", "placement.strategy=horovod", "run.dir=run", "run.save_every={steps: 2}")
    process = start(tmp_path, *lockstep(*RUN, "recipe.epochs=50", *words))
    saved = tmp_path / "run" / "checkpoints"
    while process.poll() is None and not list(saved.glob("step-*/manifest.json")):
        time.sleep(0.1)
    ranks = psutil.Process(process.pid).children()
    ranks[-1].kill()
    assert "killed by SIGKILL" in ended(process, code=1)
    assert not any(each.is_running() for each in ranks)


def test_what_is_not_installed_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="build it for this torch with scripts/install-horovod, or use strategy ddp"):
        horovod.Strategy().check(2, 4)
    horovod.Strategy().check(1, 4)  # of one process nothing is sent


def test_what_is_sent_in_fp16_widens_the_tolerance() -> None:
    assert horovod.Strategy().traits.exactness == "close"
    assert horovod.Strategy().traits.sent is None
    assert horovod.Strategy("fp16").traits.sent == "fp16"
