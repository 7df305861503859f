"""Orders, batches of classes, frozen weights and a rate of 0: one hash on any placement, and after a resume."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import loops
import pytest
import torch
import worlds
from loop_ends import ended
from one_process import joined
from test_joined import assert_resumes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lockstep.orders import Weighted

PLACED = (("ddp", 2), ("ddp", 3), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("zero3", 3))


@pytest.mark.parametrize(
    "order",
    [
        "sequential",
        lambda epoch: [(7 * each + epoch) % 40 for each in range(40)],
        Weighted([1 + each % 3 for each in range(40)], seed=5, samples=40),
    ],
    ids=["sequential", "function", "weighted"],
)
def test_a_run_goes_on_in_its_order(order: Any, tmp_path: Path) -> None:
    seen: list[list[int]] = []

    def trained(run: Any, last: int) -> None:
        model, _ = loops.placed(run)
        numbers = TensorDataset(*loops.data().tensors, torch.arange(40))
        seen.append([])
        for step in run.steps(numbers, batch=16, microbatches=4, epochs=2, order=order):
            for inputs, targets, number in step:
                seen[-1] += number.tolist()
                step.backward(sum=loops.loss(model, (inputs, targets)))
            step.update()
            if step.number == last:
                break

    assert_resumes(trained, tmp_path)
    whole, before, after = seen
    assert before + after == whole


@dataclass
class Pairs:
    """A batch as many libraries have it: a class with fields."""

    inputs: Tensor
    targets: Tensor


class PairItems(Dataset[Pairs]):
    def __len__(self) -> int:
        return loops.SAMPLES

    def __getitem__(self, number: int) -> Pairs:
        inputs, targets = loops.data()[number]
        return Pairs(inputs, targets)


def collate(items: list[Pairs]) -> Pairs:
    return Pairs(torch.stack([each.inputs for each in items]), torch.stack([each.targets for each in items]))


def with_a_class(run: Any) -> None:
    model, _ = loops.placed(run)
    for step in run.steps(PairItems(), batch=16, microbatches=4, epochs=2, collate=collate):
        for batch in step:
            step.backward(mean=F.cross_entropy(model(batch.inputs), batch.targets))
        step.update()


def with_tuples(run: Any) -> None:
    model, _ = loops.placed(run)
    for step in run.steps(loops.data(), batch=16, microbatches=4, epochs=2):
        for inputs, targets in step:
            step.backward(mean=F.cross_entropy(model(inputs), targets))
        step.update()


def frozen_head(run: Any) -> None:
    """All parameters are in the optimizer: a frozen layer too, and a group whose rate is 0."""
    model = loops.net()
    model[0].requires_grad_(False)
    groups: list[Mapping[str, Any]] = [
        {"params": [*model[0].parameters(), *model[1].parameters()]},
        {"params": model[4].parameters(), "lr": 0.0},
    ]
    before = [each.clone() for each in model[4].parameters()]
    placed, _ = run.place(model, torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0))
    for step in loops.computed(run, placed, epochs=2):
        step.update()
    assert all(torch.equal(a, _whole(b)) for a, b in zip(before, _head(placed), strict=True))


def no_rate(run: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 13), nn.ReLU(), nn.Linear(13, 3))
    before = [each.clone() for each in model.parameters()]
    model, _ = run.place(model, torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9))
    for step in loops.computed(run, model, epochs=1):
        step.update()
    assert all(torch.equal(a, _whole(b)) for a, b in zip(before, model.parameters(), strict=True))


def _head(model: Any) -> list[Tensor]:
    return [each for name, each in model.named_parameters() if name.startswith("4.")]


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.worlds
@pytest.mark.parametrize("loop", [with_a_class, frozen_head, no_rate])
def test_every_placement_has_the_hash_of_one_process(loop: Any) -> None:
    [one] = worlds.run(1, ended, "single", loop)
    assert len(one) == 64
    for strategy, size in PLACED:
        assert {*worlds.run(size, ended, strategy, loop)} == {one}, (strategy, size)


def test_a_batch_of_a_class_trains_as_a_tuple_does() -> None:
    hashes = []
    for loop in (with_a_class, with_tuples):
        with joined() as run:
            loop(run)
            hashes.append(run.fingerprint())
    assert hashes[0] == hashes[1]
