# $ python tutorial/10-spawn/ddp_spawn.py 2
"""The training of lesson 9 without a launcher: the script starts its processes itself."""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 48  # the batch of all processes together


def samples() -> tuple[Tensor, Tensor]:
    """Return 1,200 points in 20 dimensions; the class of each is the largest of its first four numbers."""
    x = torch.randn(1200, 20, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4].argmax(1)


def train(rank: int, world_size: int, rendezvous: str) -> None:
    """Be one rank of `world_size`; spawn gives each process its rank as the first argument."""
    torch.set_num_threads(1)  # torchrun does this: else every process starts a thread for every core
    has_gpu = torch.cuda.device_count() >= world_size
    device = torch.device("cuda", rank) if has_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if has_gpu else "gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    ddp = DistributedDataParallel(model)  # sends rank 0's weights to all
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = TensorDataset(*samples())
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)  # other samples on every rank
    loader = DataLoader(data, BATCH // dist.get_world_size(), sampler=sampler)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # else every epoch has the order of the first
        total = torch.zeros((), device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = cross_entropy(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()  # averages the gradients over the ranks while it computes them
            optimizer.step()
            total += loss.detach() * len(x)
        dist.all_reduce(total)  # each rank knows its own samples' loss only
        losses.append(total.item() / len(data))
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    assert losses[-1] < losses[0] / 2
    dist.destroy_process_group()


def main() -> None:
    world_size = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        # No port that somebody else may have taken: the ranks find each other by a file of this machine.
        mp.spawn(train, (world_size, f"file://{folder}/rendezvous"), nprocs=world_size, join=True)


if __name__ == "__main__":  # spawned processes import this file, and must not start processes in turn
    main()
