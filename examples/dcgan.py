"""A DCGAN: two nets that learn in turn from the same micro-batches, with the same bits on any number of processes.

It needs scikit-learn, for its digits: pip install scikit-learn
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import lockstep

EPOCHS, BATCH, NOISE = 3, 64, 32


def generator() -> nn.Module:
    small = nn.Sequential(nn.Linear(NOISE, 64 * 4), nn.Unflatten(1, (64, 2, 2)), nn.BatchNorm2d(64), nn.ReLU())
    middle = nn.Sequential(nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
    return nn.Sequential(small, middle, nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Tanh())


def discriminator() -> nn.Module:
    large = nn.Sequential(nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2))
    middle = nn.Sequential(nn.Conv2d(32, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.LeakyReLU(0.2))
    return nn.Sequential(large, middle, nn.Flatten(), nn.Linear(64 * 4, 1))


def loss(scores: Tensor, real: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, real), reduction="sum")


def main(folder: str | None = None) -> None:
    run = lockstep.join(seed=0, dir=folder)
    digits = TensorDataset(torch.tensor(load_digits().images, dtype=torch.float32)[:640, None] / 8 - 1)
    nets = nn.ModuleDict({"G": generator(), "D": discriminator()})
    groups = [{"params": net.parameters(), "name": name} for name, net in nets.items()]
    optimizer = torch.optim.Adam(groups, lr=2e-4, betas=(0.5, 0.999))
    scheduler = LambdaLR(optimizer, lambda epoch: 1 - epoch / EPOCHS)
    nets, optimizer = run.place(nets, optimizer, scheduler=scheduler)
    for step in run.steps(digits, batch=BATCH, microbatches=4, epochs=EPOCHS):
        for (real,) in step:
            fake = nets["G"](torch.randn(len(real), NOISE)).detach()
            step.backward(sum=loss(nets["D"](real), 1.0) + loss(nets["D"](fake), 0.0))
        step.update(of="D")
        for (real,) in step:
            step.backward(sum=loss(nets["D"](nets["G"](torch.randn(len(real), NOISE))), 1.0))
        step.update(of="G")
        if step.every(epochs=1):
            scheduler.step()
            if run.dir is not None:
                run.save()


if __name__ == "__main__":
    main(*sys.argv[1:])
