"""The script of tutorials beside a recipe, checked against that script written by hand."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import events
from torch.nn import functional
from torch.utils.data import DistributedSampler

from benchmarks import naive_ddp
from lockstep.config.load import load
from lockstep.core import random
from lockstep.data.base import Request
from lockstep.setup.build import Setup, build_setup
from lockstep.setup.examples import get_device_transforms

pytestmark = pytest.mark.slow("other programs, or minutes")

BATCH, LR, EPOCHS = 64, 0.3, 2
RECIPE = (
    "digits",
    f"recipe.epochs={EPOCHS}",
    f"recipe.batch={BATCH}",
    f"recipe.optimizer={{name: sgd, lr: {LR}, momentum: 0}}",
    "recipe.schedule={name: constant, warmup_epochs: 0}",
    "recipe.loss.label_smoothing=0",
    "recipe.clip_norm=null",
    "recipe.model.name=held:linear",
    "recipe.model.source=auto",
    "recipe.model.options={}",
)
QUICK = ("run.tensorboard=false", "run.probe=off", "run.log_every=1")
ROOT = Path(__file__).parents[2]


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    found = json.loads((folder / "a" / "comparison.json").read_text(encoding="utf-8"))["rows"]
    return {row["placement"]: row for row in found}


def by_hand(ready: Setup, ranks: int) -> dict[str, float]:
    """Train as so many ranks would, in this process: a step is the mean of their means."""
    train, validation = ready.data.train, ready.data.validation
    change = get_device_transforms(ready.recipe, ready.data)
    model = ready.build_unchunked()
    optimizer = torch.optim.SGD(model.parameters(), LR)

    def samplers(length: int, shuffle: bool) -> list[DistributedSampler[Any]]:
        return [DistributedSampler(range(length), ranks, rank, shuffle) for rank in range(ranks)]  # type: ignore[arg-type]

    losses: list[list[float]] = []
    for epoch in range(EPOCHS):
        orders = []
        for sampler in samplers(len(train), shuffle=True):
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        losses = [[] for _ in range(ranks)]
        for first in range(0, len(orders[0]), BATCH):
            optimizer.zero_grad()
            for rank, order in enumerate(orders):
                numbers = torch.tensor(order[first : first + BATCH]).numpy()
                request = Request(numbers, random.make_key(random.AUGMENT, 0, epoch))
                x, y = change.transform_training_batch(change.prepare(train.fetch(*request), request), 0, 0)
                loss = functional.cross_entropy(model(x), y)
                (loss / ranks).backward()
                losses[rank].append(float(loss.detach()))
            optimizer.step()

    def right(numbers: list[int]) -> float:
        x, y = change.transform_evaluation_batch(validation.fetch(torch.tensor(numbers).numpy(), None))
        return float((model(x).argmax(1) == y).double().mean())

    shares = [right(list(each)) for each in samplers(len(validation), shuffle=False)]
    means = [sum(each) / len(each) for each in losses]
    return {
        "printed loss/train": means[0],
        "loss of all ranks": sum(means) / ranks,
        "printed top1/validation": sum(shares) / ranks,
        "top1": right(list(range(len(validation)))),
    }


def program(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.naive_ddp", *RECIPE, *QUICK, *words, "--dir", str(folder / "a")]


@pytest.fixture
def env() -> dict[str, str]:
    """The environment in which both the benchmarks and what a recipe of these tests names are found."""
    paths = [str(ROOT), str(ROOT / "tests" / "commands"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def test_it_computes_and_prints_what_the_script_by_hand_does(tmp_path: Path, env: dict[str, str]) -> None:
    asked = program(tmp_path, "--processes", "1,2")
    done = subprocess.run(asked, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path)
    assert [*found] == ["single on 1", "usual script on 1", "usual script on 2"]
    ready = build_setup(load(RECIPE[0], list(RECIPE[1:])).config.recipe)
    for ranks in (1, 2):
        row = found[f"usual script on {ranks}"]
        expected = by_hand(ready, ranks)
        assert {name: row["last"][name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert (row["state"], row["promises"], row["same_bits_as_single"]) == ("done", "none", False)
        assert len(row["peak_bytes_by_rank"]) == ranks
        [started] = events(tmp_path / row["run"], "started")
        samples = started["train_samples"]
        assert started["batch"] == ranks * BATCH
        samples_seen = [event["samples"] for event in events(tmp_path / row["run"], "step")]
        assert len(samples_seen) == started["steps"] == EPOCHS * math.ceil(math.ceil(samples / ranks) / BATCH)
        assert samples_seen[-1] == EPOCHS * samples
    assert found["usual script on 2"]["weights_sha256"] != found["usual script on 1"]["weights_sha256"]
    assert "top1 of each" in done.stdout

    before = [(tmp_path / row["run"] / "events.jsonl").read_bytes() for row in found.values()]
    subprocess.run(asked, cwd=tmp_path, env=env, check=True, capture_output=True)
    assert [(tmp_path / row["run"] / "events.jsonl").read_bytes() for row in found.values()] == before


def test_what_it_does_not_do_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words, told in (
        (["recipe.batchnorm=sync"], "usual script: its BatchNorm is that of a process"),
        (["recipe.precision=bf16"], "usual script: it trains in fp32, and recipe.precision is bf16"),
        (["recipe.last_batch=drop", "recipe.batch=900"], "of 2 each has 718 samples, which do not fill one of 900"),
    ):
        assert naive_ddp.main(["digits", *words, "--processes", "2", "--dir", str(tmp_path / "a")]) == 2
        assert told in capsys.readouterr().err
