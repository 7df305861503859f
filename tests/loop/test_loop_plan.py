"""What `run.place` and `run.steps` are given: the same on every rank, or refused."""

import re
from typing import Any

import loops
import pytest
import torch
import worlds
from loop_ends import ended
from one_process import joined
from torch.utils.data import TensorDataset

from lockstep.core.sample_order import SampleOrder
from lockstep.data.items import MapStyleSplit
from lockstep.errors import UsageError
from lockstep.loop.plan import LoopPlan, make_plan
from lockstep.orders import Weighted


def plan(batch: int, microbatches: int | None, microbatch: int | None) -> LoopPlan:
    order = SampleOrder("shuffled", 0, 100)
    return make_plan(MapStyleSplit(range(100), None), batch, microbatches, microbatch, 1, None, None, False, order)


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
    with pytest.raises(UsageError, match=f"run.steps: got microbatch={microbatch} and microbatches={microbatches}"):
        plan(64, microbatches, microbatch)


@pytest.mark.parametrize(
    ("batch", "microbatches", "found"),
    [
        (32, 2, ""),  # the last step has 4 samples
        (16, 3, "the last step of an epoch has 4 samples in 3 micro-batches, some with a single sample"),
        (33, 8, "the last step of an epoch has a single sample"),
        (20, 11, "the last step of an epoch has 20 samples in 11 micro-batches, some with a single sample"),
        (48, 25, "the last step of an epoch has 4 samples in 4 micro-batches, some with a single sample"),
        (50, 25, ""),
    ],
)
def test_micro_batches_of_one_sample_are_foreseen(batch: int, microbatches: int, found: str) -> None:
    assert plan(batch, microbatches, None).single_sample_note == found


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
        assert text.startswith("initial weights: 0.bias, 0.weight, 4.bias, 4.weight: the two ranks disagree")


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
        assert "test_loop_plan.py" in text
        assert text.endswith(
            "; pass the same arguments and the whole dataset on every rank, because run.steps distributes it, "
            "and do not order the dataset by iterating over a set of strings"
        )


def order_by_rank(run: Any) -> None:
    loops.placed(run)
    given: Any = {"order": lambda epoch: [(each + epoch * run.rank) % 40 for each in range(40)]}
    for step, *batch in loops.micro_batches(run.steps(loops.data(), batch=16, microbatches=4, epochs=2, **given)):
        step.backward(sum=loops.loss(run._model, batch))


def order_of_epochs(run: Any) -> None:
    loops.placed(run)
    order = Weighted([1 + each % 3 for each in range(40)], seed=5, samples=30)
    for step, *batch in loops.micro_batches(run.steps(loops.data(), batch=12, microbatches=4, epochs=2, order=order)):
        step.backward(sum=loops.loss(run._model, batch))


@pytest.mark.worlds
def test_an_order_of_the_loop_is_the_same_on_every_rank_or_refused() -> None:
    [one] = worlds.run(1, ended, "single", order_of_epochs)
    assert {*worlds.run(3, ended, "ddp", order_of_epochs), *worlds.run(2, ended, "zero3", order_of_epochs)} == {one}
    for text in worlds.run(2, ended, "ddp", order_by_rank):
        assert re.match(r"run.steps: the order of epoch 1: rank 1 .*; compute order= only from the epoch", text), text


def test_an_order_that_depends_on_earlier_calls_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    with joined() as run:
        loops.placed(run)
        with pytest.raises(
            UsageError, match="different indices when it was called twice for epoch 0, so a resumed run"
        ):
            run.steps(loops.data(), batch=16, epochs=2, order=lambda _: torch.randperm(40, generator=generator))
        run.steps(loops.data(), batch=16, epochs=2, order=lambda _: torch.randperm(40))  # the run seeds this generator
