"""`lockstep compare --usual`: the script of tutorials beside a recipe, checked against that script written by hand."""

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import events, steps
from torch.nn import functional
from torch.utils.data import DistributedSampler

from lockstep.comparison.plan import ComparisonRequest, plan_runs
from lockstep.comparison.result import NAIVE
from lockstep.config.load import load
from lockstep.core import random
from lockstep.data.base import Request
from lockstep.errors import UsageError
from lockstep.setup.build import Setup, setup
from lockstep.setup.examples import transforms_of

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
QUICK = ("run.tensorboard=false", "run.probe=off", "run.log_every=1", "--placements", "ddp", "--dir", "a", "--no-page")


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    found = json.loads((folder / "a" / "comparison.json").read_text(encoding="utf-8"))["rows"]
    return {row["placement"]: row for row in found}


def by_hand(ready: Setup, ranks: int) -> dict[str, float]:
    """Train as so many ranks would, in this process: a step is the mean of their means."""
    train, validation = ready.data.train, ready.data.validation
    change = transforms_of(ready.recipe, ready.data, torch.device("cpu"))
    model = ready.uncut()
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
                request = Request(numbers, random.key(random.AUGMENT, 0, epoch))
                x, y = change.for_training(change.prepare(train.fetch(*request), request), 0, 0)
                loss = functional.cross_entropy(model(x), y)
                (loss / ranks).backward()
                losses[rank].append(float(loss.detach()))
            optimizer.step()

    def right(numbers: list[int]) -> float:
        x, y = change.for_evaluation(validation.fetch(torch.tensor(numbers).numpy(), None))
        return float((model(x).argmax(1) == y).double().mean())

    shares = [right(list(each)) for each in samplers(len(validation), shuffle=False)]
    means = [sum(each) / len(each) for each in losses]
    return {
        "printed loss/train": means[0],
        "loss of all ranks": sum(means) / ranks,
        "printed top1/validation": sum(shares) / ranks,
        "top1": right(list(range(len(validation)))),
    }


def test_it_computes_and_prints_what_the_script_by_hand_does(run, monkeypatch):
    command = run("compare", *RECIPE, *QUICK, "--processes", "1,2", "--usual")
    found = rows(command.folder)
    assert [*found] == ["single on 1", "ddp on 2", "usual script on 1", "usual script on 2"]
    monkeypatch.syspath_prepend(Path(__file__).parent)
    ready = setup(load(RECIPE[0], list(RECIPE[1:])).config.recipe)
    for ranks in (1, 2):
        row = found[f"usual script on {ranks}"]
        expected = by_hand(ready, ranks)
        assert {name: row["last"][name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert (row["state"], row["promises"], row["same_bits_as_single"]) == ("done", "none", False)
        assert len(row["peak_bytes_by_rank"]) == ranks
        [started] = events(command.folder / row["run"], "started")
        samples = started["train_samples"]
        assert started["batch"] == ranks * BATCH
        samples_seen = [event["samples"] for event in events(command.folder / row["run"], "step")]
        assert len(samples_seen) == started["steps"] == EPOCHS * math.ceil(math.ceil(samples / ranks) / BATCH)
        assert samples_seen[-1] == EPOCHS * samples
    assert found["usual script on 2"]["weights_sha256"] != found["usual script on 1"]["weights_sha256"]
    assert "top1 of each sample once" in command.out
    assert command.left() == []

    before = [(command.folder / row["run"] / "events.jsonl").read_bytes() for row in found.values()]
    again = run("compare", *RECIPE, *QUICK, "--processes", "1,2", "--usual")
    assert [(again.folder / row["run"] / "events.jsonl").read_bytes() for row in found.values()] == before


def test_an_interruption_leaves_no_process_and_it_begins_anew(run, start):
    asked = ("compare", *RECIPE, *QUICK, "recipe.epochs=10", "--processes", "2", "--usual")
    command = start(*asked)

    def logged() -> list[int]:
        found = next((command.folder / "a").glob("usual-script-2*"), None)
        return steps(found) if found else []

    command.until(logged)
    command.signal_group(signal.SIGINT)
    assert command.wait() == 130
    assert command.left() == []
    assert len(logged()) < 10 * 12
    run(*asked)
    assert logged() == [*range(1, 10 * 12 + 1)]


def test_what_the_script_passes_over_gives_it_no_row(tmp_path: Path) -> None:
    variants = ("recipe.batchnorm=sync", "recipe.microbatches=2", "recipe.batch=32")
    plans = plan_runs(ComparisonRequest("digits", (), ({"name": "ddp"},), (1,), variants, tmp_path / "a", usual=True))
    found = [(plan.row.strategy, plan.row.variant) for plan in plans]
    given = "recipe.batchnorm=local, recipe.microbatches=4, recipe.batch=64"
    assert [variant for strategy, variant in found if strategy == NAIVE] == [given, "recipe.batch=32"]
    assert [variant for strategy, variant in found if strategy == "single"] == [given, *variants]
    with pytest.raises(UsageError, match=r"usual script: its BatchNorm is that of a process"):
        plan_runs(ComparisonRequest("digits", variants[:1], ({"name": "ddp"},), (1,), (), tmp_path / "b", usual=True))


def test_a_variant_that_is_the_recipe_itself_is_trained_once(tmp_path: Path) -> None:
    variants = ("recipe.optimizer.lr=0.05", "recipe.optimizer.lr=0.1", "recipe.optimizer.lr=5e-2")
    plans = plan_runs(ComparisonRequest("digits", (), ({"name": "ddp"},), (1,), variants, tmp_path))
    assert [plan.row.variant for plan in plans] == [variants[1], variants[0]]
