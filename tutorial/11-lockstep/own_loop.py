# $ python tutorial/11-lockstep/own_loop.py runs/own-1 | tail -1
# $ torchrun --standalone --nproc-per-node=3 tutorial/11-lockstep/own_loop.py runs/own-3 | tail -1
"""The training of lesson 9 with Lockstep: the same weights, bit for bit, on any number of processes."""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import lockstep

EPOCHS, BATCH = 3, 48  # the batch of all processes together


def samples() -> tuple[Tensor, Tensor]:
    """Return 1,200 points in 20 dimensions; the class of each is the largest of its first four numbers."""
    x = torch.randn(1200, 20, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4].argmax(1)


def main(folder: str, strategy: str = "auto") -> None:
    run = lockstep.join(seed=0, dir=folder)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = run.place(model, optimizer, strategy=strategy)
    data = TensorDataset(*samples())
    total = 0.0
    for step in run.steps(data, batch=BATCH, microbatches=4, epochs=EPOCHS):
        for x, y in step:
            step.backward(mean=cross_entropy(model(x), y))
        step.update()
        total += step.loss.item() * BATCH
        if step.every(epochs=1):
            run.log(mean_loss=total / len(data))
            total = 0.0


if __name__ == "__main__":
    main(*sys.argv[1:])
