# $ export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; \
#   torchrun --standalone --nproc-per-node=3 --max-restarts=1 tutorial/25-elastic/killed.py runs/a | tail -1
# $ lockstep launch --on local --processes-per-node 3 -- python tutorial/25-elastic/killed.py runs/b | \
#   grep -o "saved [^ ]*"; python tutorial/25-elastic/killed.py runs/b | grep -E "resuming|weights"
"""The training of lesson 11, of which rank 1 is killed: it resumes by itself, or when it is started again."""

import os
import signal
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


def main(folder: str) -> None:
    run = lockstep.join(seed=0, dir=folder)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = run.place(model, optimizer)
    data = TensorDataset(*samples())
    total = 0.0
    first = run.step
    for step in run.steps(data, batch=BATCH, microbatches=4, epochs=EPOCHS):
        for x, y in step:
            step.backward(sum=cross_entropy(model(x), y, reduction="sum"))
        if (first, step.number, run.rank) == (0, 36, 1):  # in the second epoch
            os.kill(os.getpid(), signal.SIGKILL)
        step.update()
        total += step.loss.item() * BATCH
        if step.every(epochs=1):
            run.log(mean_loss=total / len(data))
            total = 0.0
            run.save()


if __name__ == "__main__":
    main(*sys.argv[1:])
