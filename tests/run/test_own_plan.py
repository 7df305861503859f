"""What `run.place` and `run.steps` are given: the same on every rank, or refused."""

import re
from typing import Any

import loops
import pytest
import torch
import worlds
from loop_ends import ended
from torch.utils.data import TensorDataset

from lockstep.data.items import Items
from lockstep.errors import UsageError
from lockstep.run.own_plan import OwnPlan, make_plan


def plan(batch: int, microbatches: int | None, microbatch: int | None) -> OwnPlan:
    return make_plan(Items(range(100), None), batch, microbatches, microbatch, 1, None, None, False)


@pytest.mark.parametrize(
    ("batch", "microbatches", "microbatch", "count"),
    [
        (256, None, None, 8),
        (32, None, None, 1),
        (33, None, None, 2),
        (4, None, None, 1),
        (64, 2, None, 2),
        (64, None, 4, 16),
        (65, None, 4, 17),
        (64, None, 100, 1),
    ],
)
def test_micro_batches_by_their_number_or_their_size(
    batch: int, microbatches: int | None, microbatch: int | None, count: int
) -> None:
    assert plan(batch, microbatches, microbatch).microbatches == count


@pytest.mark.parametrize(("microbatches", "microbatch"), [(4, 16), (None, 0), (None, -1)])
def test_one_of_both_is_given(microbatches: int | None, microbatch: int) -> None:
    with pytest.raises(UsageError, match=f"run.steps: microbatch is {microbatch}, and microbatches {microbatches}"):
        plan(64, microbatches, microbatch)


def weights_by_rank(run: Any) -> None:
    torch.manual_seed(run.rank)  # as many scripts for other frameworks do
    loops.placed(run)


def samples_by_rank(run: Any) -> None:
    loops.placed(run)
    for _ in run.steps(TensorDataset(*loops.data()[run.rank :: run.size]), batch=8, microbatches=2, steps=1):
        pass


def fewer_samples(run: Any) -> None:
    loops.placed(run)
    for _ in run.steps(loops.data(40 - run.rank), batch=8, microbatches=2, steps=1):
        pass


@pytest.mark.worlds
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_other_first_weights_are_refused_before_a_strategy_cuts_them(strategy: str) -> None:
    for text in worlds.run(2, ended, strategy, weights_by_rank):
        assert text.startswith("first weights: 0.bias, 0.weight, 4.bias, 4.weight: two ranks disagree")


@pytest.mark.worlds
@pytest.mark.parametrize(
    ("loop", "differ"),
    [
        (samples_by_rank, r"first and last sample: rank 1 .*: \w{16}, not "),
        (fewer_samples, "samples: .*: 39, not 40"),
    ],
)
def test_another_dataset_on_a_rank_is_refused(loop: Any, differ: str) -> None:
    for text in worlds.run(2, ended, "ddp", loop):
        assert re.match(f"run.steps: {differ}", text), text
        assert "test_own_plan.py" in text
        assert text.endswith("; give every rank the same, and the whole dataset: run.steps shares it out")
