# $ python tutorial/03-data-parallel/data_parallel.py
"""What nn.DataParallel does, by hand: one process, a copy of the model and a thread for each part of the batch."""

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

PARTS = 3


def gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def backward_in_parts(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Leave in `model` the gradients of the batch, computed by copies of the model."""
    copies = [copy.deepcopy(model) for _ in range(PARTS)]  # replicate: the weights travel at every step
    with ThreadPoolExecutor(PARTS) as threads:  # scatter the batch, and compute each part in a thread
        outputs = list(threads.map(lambda replica, part: replica(part), copies, x.chunk(PARTS)))
    cross_entropy(torch.cat(outputs), y).backward()  # gather all outputs on one device, which computes the loss
    for parameter, *parts in zip(model.parameters(), *(each.parameters() for each in copies), strict=True):
        parameter.grad = torch.stack([part.grad for part in parts if part.grad is not None]).sum(0)  # reduce


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    x = torch.randn(48, 20)
    y = x[:, :4].argmax(1)
    cross_entropy(model(x), y).backward()
    whole = gradients(model)
    model.zero_grad()
    backward_in_parts(model, x, y)
    for expected, found in zip(whole, gradients(model), strict=True):
        torch.testing.assert_close(found, expected)
    print(f"{PARTS} copies and one model: the same {len(whole)} gradients")
    if torch.cuda.device_count() > 1:
        model.cuda().zero_grad()
        cross_entropy(nn.DataParallel(model)(x.cuda()), y.cuda()).backward()
        for expected, found in zip(whole, gradients(model), strict=True):
            torch.testing.assert_close(found.cpu(), expected)


if __name__ == "__main__":
    main()
