"""Runs under strategy deepspeed: stopped, resumed elsewhere, shown, begun from DeepSpeed's own checkpoints, refused."""

import json
import os
import shutil
import signal

import psutil
import pytest
import safetensors.torch
import torch
from component import require_package
from conftest import DIGITS
from forked import events
from test_resume import stop, undisturbed

pytestmark = pytest.mark.slow("runs whole commands")

PLACED = ("placement.strategy={name: deepspeed, stage: 3}", "placement.processes=2")
MICRO = "recipe.microbatches=4"


@pytest.fixture(autouse=True)
def _installed():
    require_package("deepspeed")


def losses(command):
    return [event["loss"] for event in events(command.folder / "run", "step")]


def test_an_interrupted_run_goes_on_under_another_strategy(start, run, finished):
    stopped = stop(start, MICRO, *PLACED, number=signal.SIGINT)
    (end,) = events(stopped.folder / "run", "stopped")
    assert (end["reason"], stopped.err) == ("SIGINT", "")
    assert 0 < end["step"] < 23
    given = json.loads((stopped.folder / "run/deepspeed.json").read_text())
    assert given["zero_optimization"]["stage"] == 3
    shown = run("show", *DIGITS, MICRO, *PLACED)
    assert json.loads(shown.out.partition("deepspeed.json\n")[2]) == given
    shutil.copytree(stopped.folder / "run", stopped.folder / "other", symlinks=True)
    resumed = run("train", *DIGITS, "run.dir=run", MICRO, "placement.strategy=zero3", "placement.processes=3")
    # All of the state is in its checkpoint: what goes on from it has the same bits, whatever the strategy.
    assert resumed.sha256 == run("train", *DIGITS, "run.dir=other", MICRO, "placement.processes=1").sha256
    assert losses(resumed)[:5] == pytest.approx(losses(undisturbed(finished))[:5], rel=1e-5)
    assert not (resumed.folder / "run/deepspeed.json").exists()


def test_a_lost_rank_is_named_and_ends_the_others(start):
    command = start("train", *DIGITS, "run.dir=run", "recipe.epochs=500", MICRO, *PLACED)
    command.until_step(2)
    os.kill(psutil.Process(command.pid).children()[-1].pid, signal.SIGKILL)
    assert command.wait() == 1
    assert "[rank 1 of 2, " in command.err
    assert "error: was killed by SIGKILL" in command.err
    assert command.left() == []


def test_a_run_begins_from_what_deepspeed_saved(run, finished, tmp_path):
    weights = safetensors.torch.load_file(undisturbed(finished).folder / "run/checkpoints/latest/model.safetensors")
    step = tmp_path / "theirs" / "global_step7"
    step.mkdir(parents=True)
    torch.save({"module": weights, "global_steps": 7}, step / "mp_rank_00_model_states.pt")
    (step.parent / "latest").write_text("global_step7")
    begun = run("train", *DIGITS, "run.dir=run", MICRO, "recipe.model.weights=theirs", "placement.processes=1")
    assert losses(begun)[0] < 0.9 * losses(undisturbed(finished))[0]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ("recipe.optimizer={name: lamb, lr: 0.01, weight_decay: 0.01}",),
            "optimizer Lamb is not supported, because it updates flattened pieces",
        ),
        (("placement.audit_every=2",), "strategy deepspeed does not support audits"),
        (("placement.strategy={name: deepspeed, stage: 4}",), "placement.strategy.stage: Input should be 1, 2 or 3"),
        (("placement.strategy={name: deepspeed, offlaod: cpu}",), "did you mean 'offload'?"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(run, words, problem):
    refused = run("train", *DIGITS, "run.dir=run", MICRO, *PLACED, *words, code=2)
    assert problem in refused.err
    assert not (refused.folder / "run").exists()
