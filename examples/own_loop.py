"""The loop of plain_loop.py with Lockstep: the same bits on any number of processes, resumed where it stopped.

It needs scikit-learn, for its digits: pip install scikit-learn
"""

import sys

import timm
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

EPOCHS, BATCH, LR = 4, 32, 2e-3


def rate(samples: int, total: int) -> float:
    return LR * (1 - samples / total)


def main(folder: str, strategy: str = "auto") -> None:
    run = lockstep.join(seed=0, dir=folder, run={"log_every": 1})
    digits = load_digits()
    images = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, 32)
    targets = torch.tensor(digits.target)
    training, validation = TensorDataset(images[:512], targets[:512]), TensorDataset(images[1500:], targets[1500:])
    model = timm.create_model("test_resnet", num_classes=10, in_chans=1, drop_rate=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    model, optimizer = run.place(model, optimizer, strategy=strategy)
    for step in run.steps(training, batch=BATCH, microbatches=4, epochs=EPOCHS):
        for x, y in step:
            step.backward(mean=F.cross_entropy(model(x), y))
        step.update(lr=rate(step.samples_seen, EPOCHS * len(training)), clip=1.0)
        if step.every(epochs=1):
            right = run.sum((model(x).argmax(1) == y).sum() for x, y in run.each(validation))
            run.log(accuracy=right / len(validation))
        if step.every(steps=3):
            run.save()


if __name__ == "__main__":
    main(*sys.argv[1:])
