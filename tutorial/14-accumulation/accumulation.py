# $ torchrun --standalone --nproc-per-node=3 tutorial/14-accumulation/accumulation.py
"""Accumulate gradients over uneven micro-batches: the mean of means, and a sum divided once."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCH = 16  # the last one is smaller; all ranks have three, else one would wait for the others' messages


def samples(rank: int) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the batch: 40 samples on rank 0, and 2 more on each that follows."""
    x = torch.randn(40 + 2 * rank, 20, generator=torch.Generator().manual_seed(rank))
    return x, x[:, :4].argmax(1)


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))

    everything = [torch.cat(parts) for parts in zip(*(samples(each) for each in range(size)), strict=True)]
    cross_entropy(model(everything[0]), everything[1]).backward()
    expected = flat_gradient(model)  # of all samples at once, on one process

    messages = 0

    def counted(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal messages
        messages += 1
        dist.all_reduce(bucket.buffer().div_(size))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, counted)
    x, y = samples(rank)
    parts = list(zip(x.split(MICRO_BATCH), y.split(MICRO_BATCH), strict=True))

    # Wrong: a mean for each micro-batch, and for each rank. The last ones are smaller, and weigh as much.
    model.zero_grad()
    for inputs, targets in parts:
        (cross_entropy(ddp(inputs), targets) / len(parts)).backward()
    wrong, sent_each_time = flat_gradient(model), messages

    # Right: a sum, divided by the samples of all ranks; times the ranks, as DDP divides by them.
    messages = 0
    model.zero_grad()
    weight = torch.tensor(len(x))
    dist.all_reduce(weight)  # known before the first backward
    for number, (inputs, targets) in enumerate(parts):
        last = number == len(parts) - 1
        with nullcontext() if last else ddp.no_sync():  # adds up here, and sends with the last micro-batch only
            loss = cross_entropy(ddp(inputs), targets, reduction="sum")
            (loss * size / weight.item()).backward()
    torch.testing.assert_close(flat_gradient(model), expected)
    assert (wrong - expected).norm() > 0.05 * expected.norm()
    assert messages < sent_each_time
    if rank == 0:
        print(f"mean of means: off by {(wrong - expected).norm() / expected.norm():.1%}, {sent_each_time} messages")
        print(f"one division: the gradient of {len(everything[0])} samples at once, {messages} message")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
