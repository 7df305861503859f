"""A custom loop with replicas on several devices: its code doesn't change, and neither do its bits."""

from pathlib import Path
from typing import Any

import loops
import pytest
import torch
from one_process import joined
from torch import nn
from torch.nn import functional as F

import lockstep

REPLICAS = {"name": "data_parallel", "device_ids": [0, 1, 2], "output_device": 1}


def train(run: Any, strategy: Any, microbatches: int = 4, epochs: int = 2, ema: float | None = None) -> str:
    """Draw numbers, sum up figures, penalize a weight outside of the forward, and evaluate."""
    model = loops.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.place(model, optimizer, strategy, ema=ema)
    for step in run.steps(loops.data(), batch=16, microbatches=microbatches, epochs=epochs):
        for inputs, targets in step:
            outputs = model(inputs + torch.randn_like(inputs))
            step.sum(right=(outputs.argmax(1) == targets).sum())
            step.backward(mean=F.cross_entropy(outputs, targets) + 0.01 * model[0].weight.square().mean())
        step.update(clip=1.0)
        if step.every(epochs=1):
            run.log(
                loss=run.sum(loops.loss(model, batch) for batch in run.each(loops.data())), right=step.sums["right"]
            )
            if run.dir:
                run.save()
    found: str = run.fingerprint()
    return found


@pytest.mark.parametrize("microbatches", [1, 3, 4])
@pytest.mark.parametrize("strategy", ["data_parallel", REPLICAS])
def test_its_bits_are_those_of_one_device(strategy: Any, microbatches: int) -> None:
    found = set()
    for each in ("single", strategy):
        with joined() as run:
            found.add(train(run, each, microbatches, ema=0.9))
    assert len(found) == 1


@pytest.mark.parametrize(("first", "second"), [("single", REPLICAS), (REPLICAS, "single")])
def test_it_resumes_with_and_without_replicas(tmp_path: Path, first: Any, second: Any) -> None:
    with joined() as run:
        expected = train(run, "single")
    with joined(dir=tmp_path / "run") as run:
        train(run, first, epochs=1)
    with joined(dir=tmp_path / "run") as run:
        assert train(run, second) == expected


def test_groups_are_updated_apart() -> None:
    found = set()
    for strategy in ("single", REPLICAS):
        with joined() as run:
            model = nn.ModuleDict({"D": loops.net(), "G": loops.net()})
            groups = [{"params": model[name].parameters(), "name": name} for name in "DG"]
            run.place(model, torch.optim.Adam(groups, lr=1e-2), strategy)
            for step in run.steps(loops.data(), batch=16, microbatches=3, epochs=1):
                for name, other in ("DG", "GD"):
                    for inputs, targets in step:
                        outputs = model[name](inputs) + model[other](inputs).detach()
                        step.backward(mean=F.cross_entropy(outputs, targets))
                    step.update(of=name)
            found.add(run.fingerprint())
    assert len(found) == 1


def test_the_start_says_which_replica_gets_which_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    with joined() as run:
        train(run, REPLICAS, epochs=1)
    counts = ("micro-batches 1, 4 (8 samples)", "micro-batch 2 (4 samples)", "micro-batch 3 (4 samples)")
    shares = ", ".join(f"cpu with {share}" for share in counts)
    assert f"3 replicas: {shares}; gradients are added on cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        ({"name": "data_parallel", "device_ids": [0, 0]}, "device_ids contains 0 more than once"),
        ({"name": "data_parallel", "output_device": 7}, "output_device=7 is not one of the 2 replicas"),
        ({"name": "data_parallel", "replicas": 2}, "strategy data_parallel has no such option"),
    ],
)
def test_devices_that_do_not_fit_are_refused(strategy: Any, problem: str) -> None:
    with joined() as run, pytest.raises(lockstep.UsageError, match=problem):
        loops.placed(run, strategy)


def test_a_wrapped_model_is_told_the_strategy() -> None:
    model = nn.DataParallel(loops.net())
    with (
        joined() as run,
        pytest.raises(lockstep.UsageError, match='pass the model itself, and strategy="data_parallel"'),
    ):
        run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.slow("runs a loop several times")
def test_a_script_is_verified_with_replicas() -> None:
    rows = lockstep.verify(loops.training, processes=(1, 2), strategies=("ddp", "data_parallel"))
    assert {(row.strategy, row.processes, row.verdict) for row in rows} == {
        ("single", 1, "identical"),
        ("data_parallel", 1, "identical"),
        ("ddp", 2, "identical"),
    }
