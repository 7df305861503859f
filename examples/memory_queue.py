"""A memory queue, as in MoCo: each step's keys join the negatives of later steps, with the same bits on any number of
processes.

The queue is in run.state. It takes the keys of the whole batch after the update, in the order of the batch.
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import lockstep

SAMPLES, BATCH, QUEUE, WIDTH, EPOCHS = 96, 24, 60, 16, 3


class Views(Dataset[tuple[Tensor, Tensor, int]]):
    """Two views of each sample, and its number."""

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(1)
        samples = torch.randn(SAMPLES, 12, generator=draws)
        self.views = [samples + 0.1 * torch.randn(SAMPLES, 12, generator=draws) for _ in range(2)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        return self.views[0][number], self.views[1][number], number


def order(epoch: int) -> list[int]:
    """Return the order of an epoch, which the loop asks for too, to know the place of a sample in its batch."""
    numbers: list[int] = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
    return numbers


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, WIDTH))


def contrast(queries: Tensor, keys: Tensor, queue: Tensor) -> Tensor:
    """Return the mean loss of telling each query's own key from those in the queue."""
    own = (queries * keys).sum(1, keepdim=True)
    scores = torch.cat([own, queries @ queue.T], 1) / 0.2
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64, device=scores.device))


def gather_rows(run: lockstep.Run, table: Tensor) -> Tensor:
    """Return the table with the rows of all ranks: each has written those of its own samples, and 0 elsewhere.

    Every rank adds its table once, in its first turn. A row has one rank, so that nothing is rounded.
    """

    def turns() -> Iterator[Tensor]:
        for turn, _ in enumerate(run.each(range(run.size), batch=1)):
            yield table if turn == 0 else torch.zeros_like(table)

    total: Tensor = run.sum(turns()) + 0.0  # the 0.0 makes 0 of -0, which is what it becomes where ranks add to it
    return total.to(table.device, table.dtype)


def main(folder: str | None = None, microbatches: str = "4", epochs: str = str(EPOCHS)) -> None:
    run = lockstep.join(seed=0, dir=folder)
    first = F.normalize(torch.randn(QUEUE, WIDTH, generator=torch.Generator().manual_seed(2)), dim=1)
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = run.place(model, optimizer)
    run.state.setdefault("queue", first.to(run.device))
    for step in run.steps(Views(), batch=BATCH, microbatches=int(microbatches), epochs=int(epochs), order=order):
        places = torch.empty(SAMPLES, dtype=torch.int64, device=run.device)  # in the batch, by the number of the sample
        begin = step.samples_seen % SAMPLES
        places[order(step.epoch)[begin : begin + step.samples]] = torch.arange(step.samples, device=run.device)
        table = torch.zeros(step.samples, WIDTH, device=run.device)
        for x, other, numbers in step:
            queries = F.normalize(model(x), dim=1)
            with torch.no_grad():
                keys = F.normalize(model(other), dim=1)
            if not step.duplicate:
                table[places[numbers]] = keys
            step.backward(mean=contrast(queries, keys, run.state["queue"]))
        step.update()
        run.state["queue"] = torch.cat([gather_rows(run, table), run.state["queue"]])[:QUEUE].clone()
        if run.dir is not None and step.every(steps=3):
            run.save()
    print(f"loss {float(step.loss):.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
