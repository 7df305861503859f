"""Loops such as users write, as functions that a test runs on several ranks."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

SAMPLES = 40  # in batches of 16: the last is short


def data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.arange(samples) % 3)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 13), nn.BatchNorm1d(13), nn.ReLU(), nn.Dropout(0.3), nn.Linear(13, 3))


def placed(run: Any, strategy: Any = "auto") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return run.place(model, torch.optim.AdamW(model.parameters(), lr=1e-2), strategy)


def loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="sum")


def steps(run: Any, epochs: int = 1) -> Iterator[Any]:
    """Steps of 16, 16 and 8 samples, in four micro-batches: one of three ranks has two."""
    return run.steps(data(), batch=16, microbatches=4, epochs=epochs)


def micro_batches(steps: Iterator[Any], **update: Any) -> Iterator[tuple[Any, ...]]:
    """Yield each micro-batch after its step, which is updated after the last of them."""
    for step in steps:
        for batch in step:
            yield step, *batch
        step.update(**update)


def computed(run: Any, model: nn.Module, dataset: Any = None, **given: Any) -> Iterator[Any]:
    """Yield steps of 16, 16 and 8 samples once their micro-batches are computed."""
    for step in run.steps(dataset or data(), batch=16, microbatches=4, **given):
        for batch in step:
            step.backward(sum=loss(model, batch))
        yield step


def training(folder: str | None = None, epochs: int = 2) -> None:
    """Train with dropout, BatchNorm, clipping and evaluation."""
    run = lockstep.join(seed=3, dir=folder)
    model, _ = placed(run)
    for step in computed(run, model, epochs=epochs):
        step.update(lr=1e-2 / (1 + step.samples_seen), clip=1.0)
        if step.every(epochs=1):
            total = run.sum(loss(model, batch) for batch in run.each(data()))
            run.log(loss=total / SAMPLES)
            if folder:
                run.save()


def as_long_as_ranks() -> None:
    """Go through the data once for each process, and evaluate on data of one's own."""
    run = lockstep.join(seed=3)
    model, _ = placed(run)
    for step in computed(run, model, epochs=run.size):
        step.update()
        run.sum(loss(model, batch) for batch in run.each(PlainItems()))


class PlainItems:
    """Draws nothing; but generators are seeded for each item."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return data()[index]


def seeded_by_rank() -> None:
    """Build another model on each rank."""
    run = lockstep.join(seed=3)
    torch.manual_seed(run.rank)
    model, _ = placed(run)
    for step in computed(run, model, epochs=1):
        step.update()


class KeptNoise(TensorDataset):
    """Adds noise to an item when it is fetched first, and keeps it."""

    def __getitem__(self, index: int) -> Any:
        self.kept: dict[int, Any] = vars(self).get("kept", {})
        if index not in self.kept:
            inputs, target = super().__getitem__(index)
            self.kept[index] = inputs + torch.randn(6), target
        return self.kept[index]


def with_noise_kept() -> None:
    """Train on such data."""
    run = lockstep.join(seed=3)
    model, _ = placed(run)
    for step in computed(run, model, KeptNoise(*data().tensors), epochs=2):
        step.update()


PLAN = {"1.0": "whole", "1.1": "colwise", "1.4": "rowwise"}


def cut_net() -> nn.Module:
    between = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 8))
    return nn.Sequential(nn.Linear(6, 8), between, nn.BatchNorm1d(8), nn.Linear(8, 3))


def in_chunks(folder: str | None = None, strategy: Any = "auto", chunks: int = 4) -> None:
    """Train a model of which a part is cut, evaluate and save it."""
    run = lockstep.join(seed=3, dir=folder)
    model = cut_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, _ = run.place(model, optimizer, strategy, chunks=chunks, plan=PLAN)
    for step in computed(run, model, epochs=2):
        step.update(clip=1.0)
        if step.every(epochs=1):
            run.log(loss=run.sum(loss(model, batch) for batch in run.each(data())) / SAMPLES)


def tokens() -> None:
    """Weigh by what is not padding: a text weighs nothing, and in the last step a rank of three has no micro-batch."""
    texts = [torch.arange(1, 2 + number % 5) % 7 for number in range(12)] + [torch.zeros(3, dtype=torch.long)] * 2

    def padded(items: list[Tensor]) -> dict[str, Tensor]:
        return {"ids": nn.utils.rnn.pad_sequence(items, batch_first=True)}

    run = lockstep.join(seed=0)
    model = nn.Sequential(nn.Embedding(8, 5), nn.Linear(5, 8))
    model, _ = run.place(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    own = run.steps(
        texts, batch=4, microbatches=4, steps=5, collate=padded, weight=lambda batch: int((batch["ids"] > 0).sum())
    )
    for step in own:
        for batch in step:
            logits = model(batch["ids"])
            step.backward(
                sum=F.cross_entropy(logits.flatten(0, 1), batch["ids"].flatten(), ignore_index=0, reduction="sum")
            )
        step.update(lr=0.5)


class Dtypes(nn.Module):
    """Gives its inputs back changed, and keeps their dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 3)
        self.seen: set[torch.dtype] = set()

    def forward(self, inputs: Tensor, *, scale: Tensor, numbers: Tensor) -> dict[str, Any]:
        hidden = self.first(inputs) * scale
        self.seen |= {inputs.dtype, scale.dtype, hidden.dtype, self.first.weight.dtype}
        return {"logits": self.second(hidden.relu()), "numbers": numbers, "hidden": [hidden]}


def in_bf16(epochs: int = 1) -> None:
    """Compute with copies of the weights in bf16: what goes in is converted, and what comes out widened."""
    run = lockstep.join(seed=3, precision="bf16-compute")
    own = Dtypes()
    model, _ = run.place(own, torch.optim.AdamW(own.parameters(), lr=1e-2))

    def logits(inputs: Tensor, targets: Tensor) -> Tensor:
        outputs = model(inputs, scale=torch.tensor(0.5), numbers=targets)
        assert outputs["logits"].dtype == outputs["hidden"][0].dtype == torch.float32
        assert outputs["numbers"] is targets
        return outputs["logits"]

    for step in steps(run, epochs):
        for inputs, targets in step:
            step.backward(sum=F.cross_entropy(logits(inputs, targets), targets, reduction="sum"))
        step.update(clip=1.0)
        if step.every(epochs=1):
            total = run.sum(F.cross_entropy(logits(*batch), batch[1], reduction="sum") for batch in run.each(data()))
            run.log(loss=total / SAMPLES)
    assert own.seen == {torch.bfloat16}


def of_two() -> None:
    """Train two models as one, which are called by themselves."""
    run = lockstep.join(seed=3, precision="bf16-compute")
    pair = nn.ModuleDict({"first": nn.Linear(6, 9), "second": nn.Linear(9, 3)})
    model, _ = run.place(pair, torch.optim.SGD(pair.parameters(), lr=1e-1))
    for step, inputs, targets in micro_batches(steps(run)):
        outputs = model["second"](model["first"](inputs).relu())  # type: ignore[index]
        assert outputs.dtype == torch.float32
        step.backward(sum=F.cross_entropy(outputs, targets, reduction="sum"))


def exchanging() -> None:
    """Do what must not be done: exchange within a step, in which a rank of three has two micro-batches and one one."""
    run = lockstep.join(seed=3)
    model, _ = placed(run)
    for step, *batch in micro_batches(steps(run)):
        total = loss(model, batch)
        if run.size > 1:
            torch.distributed.all_reduce(total.detach())
        step.backward(sum=total)


def by_rank() -> None:
    """Do what must not be done: let the loss follow from the rank."""
    run = lockstep.join(seed=3)
    model, _ = placed(run)
    for step, *batch in micro_batches(steps(run)):
        step.backward(sum=loss(model, batch) * (1 + (run.rank and step.number > 1)))


def joined(body: Callable[[Any], None], folder: Path | None = None) -> None:
    """Give `body` a run, and end it, whatever becomes of it."""
    with lockstep.join(seed=0, dir=folder) as run:
        body(run)


class OfNames(nn.Module):
    """Do what must not be done: add up in the order of a set of names."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({f"part{number}": nn.Linear(6, 3) for number in range(9)})

    def forward(self, inputs: Tensor) -> Tensor:
        return sum(self.parts[name](inputs) for name in set(self.parts))  # type: ignore[assignment]


def in_order_of_names() -> None:
    """Train it."""
    run = lockstep.join(seed=3)
    model = OfNames()
    run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step, *batch in micro_batches(run.steps(data(), batch=16, microbatches=2, steps=2)):
        step.backward(sum=loss(model, batch))
