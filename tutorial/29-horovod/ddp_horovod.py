# $ horovodrun --gloo -np 2 python tutorial/29-horovod/ddp_horovod.py
# $ mpirun --oversubscribe -np 2 python tutorial/29-horovod/ddp_horovod.py
"""The training of lesson 9 with Horovod: its optimizer averages the gradients, and DDP is not needed."""

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 48  # the batch of all processes together


def samples() -> tuple[Tensor, Tensor]:
    """Return 1,200 points in 20 dimensions; the class of each is the largest of its first four numbers."""
    x = torch.randn(1200, 20, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4].argmax(1)


def main() -> None:
    hvd.init()  # rank and size are those of horovodrun or MPI; there is no process group of torch
    torch.set_num_threads(1)
    rank, size = hvd.rank(), hvd.size()
    has_gpu = hvd.nccl_built() and torch.cuda.device_count() >= hvd.local_size()
    device = torch.device("cuda", hvd.local_rank()) if has_gpu else torch.device("cpu")
    torch.manual_seed(rank)  # other weights on every rank, until those of rank 0 are sent
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # of use after resuming, when rank 0 alone has read it
    data = TensorDataset(*samples())
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, num_replicas=size, rank=rank)
    loader = DataLoader(data, BATCH // size, sampler=sampler)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # hands each gradient to Horovod as soon as it is computed
            optimizer.step()  # waits for the averages
            total += loss.detach() * len(x)
        losses.append(hvd.allreduce(total, op=hvd.Sum).item() / len(data))
        if rank == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    assert losses[-1] < losses[0] / 2
    for parameter in model.parameters():  # the same weights on all ranks, bit for bit
        assert torch.equal(hvd.broadcast(parameter.detach(), root_rank=0), parameter)
    hvd.shutdown()


if __name__ == "__main__":
    main()
