# $ torchrun --standalone --nproc-per-node=1 tutorial/09-ddp/ddp.py
# $ torchrun --standalone --nproc-per-node=3 tutorial/09-ddp/ddp.py
"""The training of lesson 2 with DistributedDataParallel: the batch is shared out, the gradients are averaged."""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 48  # the batch of all processes together


def samples() -> tuple[Tensor, Tensor]:
    """Return 1,200 points in 20 dimensions; the class of each is the largest of its first four numbers."""
    x = torch.randn(1200, 20, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4].argmax(1)


def main() -> None:
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    has_gpu = torch.cuda.device_count() >= local_world_size
    device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if has_gpu else "gloo")
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
    for parameter in model.parameters():  # the same weights on all ranks, bit for bit
        other = parameter.detach().clone()
        dist.broadcast(other, src=0)
        assert torch.equal(other, parameter)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
