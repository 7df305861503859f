"""A step's backward takes the loss by its name: the mean or the sum over the micro-batch."""

from collections.abc import Callable
from typing import Any

import loops
import pytest
import torch
import worlds
from loop_ends import ended
from one_process import joined
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep


def linear(run: Any) -> tuple[nn.Module, nn.Module]:
    """Return a placed model, and a copy of it."""
    model, plain = nn.Linear(6, 3), nn.Linear(6, 3)
    plain.load_state_dict(model.state_dict())
    placed, _ = run.place(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return placed, plain


def trained_by(given: Callable[[Tensor], Any]) -> None:
    with joined() as run:
        model, _ = linear(run)
        for step in loops.steps(run):
            for x, y in step:
                unnamed, named = given(F.cross_entropy(model(x), y))
                step.backward(*unnamed, **named)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (lambda loss: ((loss,), {}), "a loss without a name"),
        (lambda loss: ((loss,), {"mean": loss}), "a loss without a name"),
        (lambda loss: ((), {"mean": loss, "sum": loss}), r"both mean= and sum="),
        (lambda loss: ((), {}), "no loss"),
    ],
)
def test_a_loss_without_one_name_is_refused_with_both_forms(given: Callable[[Tensor], Any], found: str) -> None:
    said = (
        rf"step 1: step\.backward received {found} \(\S*test_step\.py:\d+\); use "
        rf"step\.backward\(mean=loss\).*step\.backward\(sum=loss\)"
    )
    with pytest.raises(lockstep.UsageError, match=said) as raised:
        trained_by(given)
    assert raised.value.exit_code == 2


def test_the_mean_over_one_microbatch_has_the_gradient_of_plain_torch_bit_for_bit() -> None:
    x, y = loops.data(37).tensors  # a weight whose inverse is none of float32's
    with joined() as run:
        model, plain = linear(run)
        order = []
        for step in run.steps(loops.data(37), batch=37, microbatches=1, steps=1):
            for inputs, targets in step:
                order = [int((x == each).all(1).nonzero()) for each in inputs]
                step.backward(mean=F.cross_entropy(model(inputs), targets))
            step.update()
        loss = F.cross_entropy(plain(x[order]), y[order])
        loss.backward()
        torch.optim.SGD(plain.parameters(), lr=0.5).step()
        assert torch.equal(model.weight, plain.weight)
        assert step.loss.item() == loss.item()


def test_means_of_uneven_microbatches_give_the_mean_over_the_step() -> None:
    inputs, targets = loops.data().tensors
    with joined() as run:
        model, plain = linear(run)
        expected = F.cross_entropy(plain(inputs), targets)
        expected.backward()
        before = model.weight.detach().clone()
        for step in run.steps(loops.data(), batch=40, microbatches=3, steps=1):  # 14, 13 and 13 samples
            for x, y in step:
                step.backward(mean=F.cross_entropy(model(x), y))
            step.update()
        torch.testing.assert_close(model.weight.detach(), before - 0.5 * plain.weight.grad)
        assert step.loss.item() == pytest.approx(expected.item(), abs=1e-6)


def by_mean(run: Any) -> None:
    """Train with uneven micro-batches whose weights are other numbers than their samples."""
    model, _ = loops.placed(run)
    options = {"batch": 14, "microbatches": 4, "epochs": 2, "weight": lambda batch: int((batch[1] != 0).sum())}
    for step in run.steps(loops.data(), **options):
        for x, y in step:
            step.backward(mean=F.cross_entropy(model(x), y, ignore_index=0))
        step.update(clip=1.0)


@pytest.mark.worlds
def test_means_are_alike_on_all_placements() -> None:
    [expected] = worlds.run(1, ended, "single", by_mean)
    assert len(expected) == 64, expected
    for size, strategy in ((2, "ddp"), (3, "zero1"), (3, "zero2"), (2, "zero3")):
        assert {*worlds.run(size, ended, strategy, by_mean)} == {expected}


def test_means_are_scaled_for_fp16_as_sums_are() -> None:
    found = {}
    for form in ("mean", "sum"):
        with joined(precision="fp16") as run:
            model, _ = linear(run)
            for step in run.steps(loops.data(32), batch=16, microbatches=4, epochs=1):
                for x, y in step:  # powers of two, by which scaling is exact
                    step.backward(**{form: F.cross_entropy(model(x), y, reduction=form)})
                step.update()
            found[form] = run.fingerprint()
    assert found["mean"] == found["sum"]


def test_a_microbatch_that_weighs_nothing_counts_for_nothing_though_its_mean_is_not_finite() -> None:
    inputs = torch.randn(16, 6)
    targets = torch.arange(16) % 3
    mask = torch.arange(16) < 5  # of the micro-batches, some are without any
    dataset = TensorDataset(inputs, targets, mask)
    found = []
    for mean in (True, False):
        with joined() as run:
            model, _ = linear(run)
            options = {"batch": 16, "microbatches": 8, "steps": 2, "weight": lambda batch: int(batch[2].sum())}
            empty = 0
            for step in run.steps(dataset, **options):
                for x, y, counts in step:
                    empty += not counts.any()
                    losses = F.cross_entropy(model(x), y, reduction="none") * counts
                    step.backward(**({"mean": losses.sum() / counts.sum()} if mean else {"sum": losses.sum()}))
                step.update()
            assert empty
            assert step.loss.isfinite()
            found.append(model.weight.detach().clone())
    torch.testing.assert_close(*found)


def two_passes(between: Callable[[Any], None], change: Callable[[Tensor], Tensor]) -> None:
    with joined() as run:
        model = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)})
        groups = [{"params": model[name].parameters(), "name": name} for name in ("a", "b")]
        model, _ = run.place(model, torch.optim.SGD(groups, lr=0.1))  # type: ignore[assignment]
        for step in loops.steps(run):
            for name in ("a", "b"):
                for x, y in step:
                    step.backward(mean=F.cross_entropy(model[name](change(x)), y))
                between(step) if name == "a" else step.update(of=name)


def test_a_second_pass_without_an_update_of_its_own_shows_the_line_to_write() -> None:
    with pytest.raises(lockstep.UsageError, match=r'its micro-batches are iterated over twice .*step.update\(of="D"\)'):
        two_passes(lambda step: step.update(), lambda x: x)


def test_a_batch_that_an_earlier_pass_changed_in_place_is_refused() -> None:
    two_passes(lambda step: step.update(of="a"), lambda x: x + 1)
    with pytest.raises(
        lockstep.UsageError, match=r"step 1: an earlier iteration modified the batch in place.*x = x \+ noise"
    ):
        two_passes(lambda step: step.update(of="a"), lambda x: x.add_(1))
