"""What tutorials make of a training script for several devices: DDP, a sampler for each rank, a batch for each rank.

    torchrun --nproc-per-node N -m benchmarks.usual_script EPOCHS

Rank 0 prints the accuracy on the validation digits in per cent: measured over all of them, and as such scripts measure
it, over what DistributedSampler pads them to.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lockstep.data.images.digits import digits
from lockstep.data.images.tensors import TensorSplit
from lockstep.models.digits_convnet import digits_convnet

BATCH, LR, MOMENTUM, WEIGHT_DECAY = 64, 0.1, 0.9, 5e-4  # those of the recipe digits, whose batch is not of a rank


def main(epochs: int) -> None:
    """Train, and print the two accuracies."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = digits()
    assert isinstance(data.train, TensorSplit)
    assert isinstance(data.validation, TensorSplit)
    training, validation = _dataset(data.train), _dataset(data.validation)
    model = DistributedDataParallel(digits_convnet())
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(training)
    loader = DataLoader(training, BATCH, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    model.eval()
    padded = _accuracy(model.module, DataLoader(validation, BATCH, sampler=DistributedSampler(validation)))
    if dist.get_rank() == 0:
        right = _right(model.module, DataLoader(validation, BATCH))
        print(f"accuracy {100 * right / len(validation):.2f} {padded:.2f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _dataset(split: TensorSplit) -> TensorDataset:
    return TensorDataset(((split.images.float() / 255) - 0.3061) / 0.3771, split.targets)


def _accuracy(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    """Return the accuracy over what all ranks' samplers give, in per cent."""
    assert loader.sampler is not None
    counts = torch.tensor([_right(model, loader), len(loader.sampler)])  # type: ignore[arg-type]
    dist.all_reduce(counts)
    return 100 * float(counts[0] / counts[1])


@torch.no_grad()
def _right(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> int:
    return sum(int((model(inputs).argmax(1) == targets).sum()) for inputs, targets in loader)


if __name__ == "__main__":
    main(int(sys.argv[1]))
