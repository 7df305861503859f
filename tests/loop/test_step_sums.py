"""`step.sum`: numbers added up over the micro-batches of a step and over ranks."""

from collections.abc import Mapping
from typing import Any

import loops
import pytest
import torch
import worlds
from loop_ends import ended
from one_process import joined
from torch import nn
from torch.nn import functional as F

import lockstep

LARGE = (1 << 51) + 1  # in float32 that would be another number


def counted(run: Any) -> None:
    """Steps of 16, 16 and 8 samples in four micro-batches, some of which are computed twice under zero2 and zero3."""
    model, _ = loops.placed(run)
    rate = 1e-2
    for step in loops.steps(run):
        own = 0
        for x, y in step:
            own += 0 if step.duplicate else int((y == 2).sum())
            step.sum(count=len(y), large=LARGE, twos=(y == 2).sum())
            step.sum(third=x.sum() / 3, flag=True)
            step.backward(mean=F.cross_entropy(model(x), y))
        step.update(lr=rate)
        twos = torch.tensor(own)
        if run.size > 1:
            torch.distributed.all_reduce(twos)
        assert step.sums["twos"] == twos
        assert step.sums["count"] == step.samples
        assert step.sums["large"] == 4 * LARGE
        assert step.sums["flag"] == 4
        rate = 1e-2 * (1 + abs(float(step.sums["third"])))  # so that its bits decide those of the weights


@pytest.mark.worlds
def test_each_sample_counts_once_on_every_placement() -> None:
    [expected] = worlds.run(1, ended, "single", counted)
    assert len(expected) == 64, expected
    for size, strategy in ((2, "ddp"), (3, "ddp"), (3, "zero2"), (3, "zero3")):
        assert {*worlds.run(size, ended, strategy, counted)} == {expected}


def counted_in_the_last_step(run: Any) -> None:
    """Count in the last step alone, of whose two micro-batches one of three ranks has none."""
    model = nn.Linear(6, 3)
    run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(loops.data(34), batch=16, microbatches=4, epochs=2):
        for x, y in step:
            if step.samples == 2:
                step.sum(count=len(y))
            step.backward(mean=F.cross_entropy(model(x), y))
        step.update()
        assert {**step.sums} == ({"count": 2.0} if step.samples == 2 else {})


@pytest.mark.worlds
def test_a_rank_without_a_microbatch_has_the_same_sums() -> None:
    [expected] = worlds.run(1, ended, "single", counted_in_the_last_step)
    assert len(expected) == 64, expected
    assert {*worlds.run(3, ended, "ddp", counted_in_the_last_step)} == {expected}


def named_by_rank(run: Any) -> None:
    model, _ = loops.placed(run)
    for step, x, y in loops.micro_batches(loops.steps(run, epochs=2)):
        step.sum(**{f"of rank {run.rank}": 1})
        step.backward(mean=F.cross_entropy(model(x), y))


@pytest.mark.worlds
def test_other_names_on_other_ranks_are_refused_on_all() -> None:
    for found in worlds.run(2, ended, "ddp", named_by_rank):
        assert "names of step.sum: rank 1 differs from rank 0: of rank 1, not of rank 0" in found


def test_sums_are_those_of_one_process_without_anything_to_add() -> None:
    with joined() as run:
        model, _ = loops.placed(run)
        for step in run.steps(loops.data(), batch=40, microbatches=1, steps=1):
            for x, y in step:
                step.sum(count=len(y), largest=x.max())
                step.backward(mean=F.cross_entropy(model(x), y))
            step.update()
        assert {**step.sums} == {"count": 40.0, "largest": loops.data()[:][0].max()}
        assert {each.dtype for each in step.sums.values()} == {torch.float64}


def test_sums_of_several_updates_are_of_the_iteration_before_each() -> None:
    with joined() as run:
        model = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)})
        groups = [{"params": model[name].parameters(), "name": name} for name in model]
        run.place(model, torch.optim.SGD(groups, lr=0.1))
        for step in run.steps(loops.data(), batch=40, microbatches=2, steps=1):
            for number, name in enumerate(model, start=1):
                for x, y in step:
                    step.sum(**{name: number})
                    step.backward(mean=F.cross_entropy(model["a"](x) + model["b"](x), y))
                step.update(of=name)
                assert {**step.sums} == {name: 2.0 * number}


def trained(number: int, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Give step.sum some values in the micro-batch of that number, before or after its backward."""
    with joined() as run:
        model, _ = loops.placed(run)
        for step in loops.steps(run):
            for position, (x, y) in enumerate(step):
                if position == number and before:
                    step.sum(**before)
                step.backward(mean=F.cross_entropy(model(x), y))
                if position == number and after:
                    step.sum(**after)
            step.update()


@pytest.mark.parametrize(
    ("number", "before", "after", "said"),
    [
        (
            0,
            {},
            {"count": 4},
            r"step\.sum was called after step\.backward at \S+ ended this micro-batch .*call it in a micro-batch",
        ),
        (1, {"count": 4}, {}, r"received count in a micro-batch, but nothing in the first one .*the same names"),
        (0, {"count": torch.ones(3)}, {}, r"received count as a Tensor of shape \[3\] .*0-dim tensors"),
        (0, {"name": "x"}, {}, r"received name as a str .*pass numbers"),
        (0, {f"n{number}": 1 for number in range(17)}, {}, r"received 17 names, but at most 16"),
    ],
)
def test_what_cannot_be_added_up_is_refused_with_its_line(
    number: int, before: Mapping[str, Any], after: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(lockstep.UsageError, match=said) as raised:
        trained(number, before, after)
    assert "test_step_sums.py:" in str(raised.value)


def test_sums_are_known_after_the_update() -> None:
    with joined() as run:
        model, _ = loops.placed(run)
        for step in loops.computed(run, model, steps=1):
            with pytest.raises(lockstep.UsageError, match=r"step\.sums is not available before step\.update"):
                _ = step.sums
            step.update()
            assert step.sums == {}
