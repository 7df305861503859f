# $ torchrun --standalone --nproc-per-node=3 tutorial/05-collectives/collectives.py
"""Every collective once: what each rank has before, and what it has afterwards."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def show(name: str, mine: Tensor, only: int | None = None) -> None:
    """Print on rank 0 what each rank has, or `only` one; all ranks call this, with tensors of one shape."""
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    if dist.get_rank() == 0:
        cells = [str(each.tolist()) if only in (None, rank) else "-" for rank, each in enumerate(everyone)]
        print(f"{name:15}" + "  ".join(f"{cell:12}" for cell in cells).rstrip())


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = torch.arange(size) + 10 * rank  # rank 1 of 3 has [10, 11, 12]
    column = torch.arange(size) * 10 + rank  # what all ranks have at this place: [1, 11, 21]
    one = torch.tensor([rank + 1])
    show("numbers", numbers)
    show("one", one)

    summed = one.clone()
    dist.all_reduce(summed)  # all ranks get the sum
    show("all_reduce", summed)
    assert summed.item() == size * (size + 1) // 2

    summed = one.clone()
    dist.reduce(summed, dst=0)  # only rank 0 gets it; what the others hold is undefined
    assert rank != 0 or summed.item() == size * (size + 1) // 2
    show("reduce to 0", summed, only=0)

    copied = one.clone()
    dist.broadcast(copied, src=0)  # all get what rank 0 has
    show("broadcast of 0", copied)
    assert copied.item() == 1

    parts = list((torch.arange(size) * 100).split(1)) if rank == 0 else None
    part = torch.empty(1, dtype=torch.long)
    dist.scatter(part, parts, src=0)  # each gets one part of what rank 0 has
    show("scatter of 0", part)
    assert part.item() == 100 * rank

    gathered = [torch.zeros_like(one) for _ in range(size)]
    dist.gather(one, gathered if rank == 0 else None, dst=0)  # rank 0 gets what all have
    assert rank != 0 or torch.cat(gathered).tolist() == list(range(1, size + 1))
    show("gather to 0", torch.cat(gathered), only=0)

    dist.all_gather(gathered, one)  # all get what all have
    show("all_gather", torch.cat(gathered))
    assert torch.cat(gathered).tolist() == list(range(1, size + 1))

    mine = torch.empty(1, dtype=torch.long)
    dist.reduce_scatter_tensor(mine, numbers)  # the sum of all numbers, of which each rank gets a part
    show("reduce_scatter", mine)
    assert mine.item() == column.sum()

    turned = torch.empty_like(numbers)
    dist.all_to_all_single(turned, numbers)  # number i goes to rank i: a transposition
    show("all_to_all", turned)
    assert turned.tolist() == column.tolist()

    group: Any = dist.group.WORLD  # of which torch's types name few methods
    summed = one.clone()
    group.allreduce([summed]).wait()  # the method that dist.all_reduce calls; wait() is not left out
    assert summed.item() == size * (size + 1) // 2
    assert not hasattr(dist, "all_reduce_multigpu")

    before = group._get_sequence_number_for_group()  # each rank counts the collectives that it has started
    first, second = one.clone(), numbers.clone()
    group.allreduce_coalesced([first, second]).wait()  # several tensors, one collective
    assert first.item() == summed.item()
    show("coalesced", second)
    assert second.tolist() == [size * (10 * (size - 1) // 2 + number) for number in range(size)]
    show("counted", torch.tensor([group._get_sequence_number_for_group() - before]))  # show itself makes one as well

    if rank == 0:  # with no src, recv takes the message that comes first and returns its sender: recv_anysource
        senders = [dist.recv(part) for _ in range(size - 1)]
        assert sorted(senders) == list(range(1, size))
    else:
        dist.send(one, dst=0)

    dist.barrier()  # nobody goes on before all have come
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
