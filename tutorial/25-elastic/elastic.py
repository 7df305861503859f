# $ export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; \
#   torchrun --standalone --nproc-per-node=3 --max-restarts=1 tutorial/25-elastic/elastic.py checkpoint worker
# $ export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 CONF=--rdzv-conf=last_call_timeout=5,keep_alive_interval=1; \
#   export JOB="--nnodes=1:2 --max-restarts=1 --rdzv-id=a --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29514"; \
#   torchrun $JOB $CONF,is_host=0 tutorial/25-elastic/elastic.py shared agent & \
#   torchrun $JOB $CONF,is_host=1 tutorial/25-elastic/elastic.py shared
"""The training of lesson 9, which is killed in its second epoch and resumes from a checkpoint, on fewer ranks too."""

import os
import signal
import sys
from pathlib import Path

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


def kill(victim: str) -> None:
    """Kill this process, or first the torchrun that started it, as a machine without power would: nothing is saved."""
    if victim == "agent":
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main(file: str, victim: str = "nobody") -> None:
    dist.init_process_group("gloo")  # torchrun gives each start its ranks and its world size
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses: list[float] = []
    if Path(file).exists():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
    resumed = len(losses) > 0
    if rank == 0:
        start = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print(f"start {start}: epoch {len(losses)}, world size {size}", flush=True)
    ddp = DistributedDataParallel(model)
    data = TensorDataset(*samples())
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, BATCH // size, sampler=sampler)  # fewer processes: more samples on each
    for epoch in range(len(losses), EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for step, (x, y) in enumerate(loader):
            if not resumed and (epoch, step) == (1, 10) and (victim == "agent" or (victim == "worker" and rank == 1)):
                kill(victim)
            loss = cross_entropy(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(x)
        dist.all_reduce(total)
        losses.append(total.item() / len(data))
        if rank == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
            torch.save(state, f"{file}.new")
            os.replace(f"{file}.new", file)  # killed while it writes, it leaves the last checkpoint as it was
    assert losses[-1] < losses[0] / 2
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
