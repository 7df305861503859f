# $ scripts/with-slurm srun -N2 -n4 --ntasks-per-node=2 python tutorial/27-slurm/ddp_slurm.py
# $ scripts/with-slurm srun -N2 -n2 -c2 python tutorial/27-slurm/ddp_slurm.py 2
"""The training of lesson 9 by Slurm: a task is a process, or a task of each node spawns its processes."""

import os
import subprocess
import sys

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


def rendezvous() -> str:
    """Return where rank 0 listens: on the first node, at a port that follows from the number of the job."""
    nodes = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]  # n[1-2] is n1 and n2
    first = subprocess.run(nodes, check=True, capture_output=True, text=True).stdout.split()[0]
    return f"tcp://{first}:{20000 + int(os.environ['SLURM_JOB_ID']) % 10000}"


def train(local_rank: int, before: int, world_size: int, here: int) -> None:
    """Be one rank of `world_size`, of which `before` are on earlier nodes and `here` on this one."""
    torch.set_num_threads(1)  # else every process starts a thread for every core
    rank = before + local_rank
    has_gpu = torch.cuda.device_count() >= here
    device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    backend = "nccl" if has_gpu else "gloo"
    dist.init_process_group(backend, init_method=rendezvous(), rank=rank, world_size=world_size)
    print(f"rank {rank} of {world_size} is local rank {local_rank} on {os.environ['SLURMD_NODENAME']}")
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


def main(processes: int = 0) -> None:
    number, tasks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    if processes:  # one task a node: it is the parent of its ranks
        mp.spawn(train, (number * processes, tasks * processes, processes), nprocs=processes)
    else:  # one task a device: it is a rank
        local_rank = int(os.environ["SLURM_LOCALID"])
        train(local_rank, number - local_rank, tasks, tasks // int(os.environ["SLURM_NNODES"]))


if __name__ == "__main__":  # spawned processes import this file, and must not start processes in turn
    main(*map(int, sys.argv[1:]))
