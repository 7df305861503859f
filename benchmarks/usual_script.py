"""What tutorials make of a training script for several devices: DDP, a sampler for each rank, a batch for each rank.

    torchrun --nproc-per-node N -m benchmarks.usual_script EPOCHS SEED

Trains MNIST-1D's convolutional net with the batch and the optimizer that its authors used. Rank 0 prints the accuracy
on all validation signals in per cent.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from mnist1d.data import get_dataset_args, make_dataset
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lockstep.models.mnist1d_nets import mnist1d_cnn

BATCH, LR = 100, 0.01  # those of the recipe mnist1d, whose batch is that of a step and not of a rank


def main(epochs: int, seed: int) -> None:
    """Train, and print the accuracy."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    data = make_dataset(get_dataset_args())
    inputs, targets = torch.from_numpy(data["x"]).float(), torch.from_numpy(data["y"]).long()
    torch.manual_seed(seed)
    model = DistributedDataParallel(mnist1d_cnn())
    training = TensorDataset(inputs, targets)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(training, seed=seed)
    loader = DataLoader(training, BATCH, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), LR)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    if dist.get_rank() == 0:
        with torch.no_grad():
            guesses = model.module(torch.from_numpy(data["x_test"]).float()).argmax(1)
        print(f"accuracy {100 * (guesses == torch.from_numpy(data['y_test'])).float().mean():.2f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
