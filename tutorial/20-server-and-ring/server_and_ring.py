# $ torchrun --standalone --nproc-per-node=4 tutorial/20-server-and-ring/server_and_ring.py
"""Add a gradient over all ranks by a parameter server and by a ring: what the busiest rank sends and receives."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

NUMBERS = 1_200_000  # in float32: 4.8 MB

moved = 0  # bytes that this rank has sent and received


def exchange(sent: Tensor | None, to: int, received: Tensor | None, source: int) -> None:
    """Send and receive at once; None is no message."""
    global moved
    works = []
    if sent is not None:
        works.append(dist.isend(sent, to))
    if received is not None:
        works.append(dist.irecv(received, source))
    for work in works:
        assert work is not None
        work.wait()
    moved += sum(each.nbytes for each in (sent, received) if each is not None)


def by_server(mine: Tensor) -> None:
    """Leave the sum in `mine`: all send to rank 0, which adds and sends the sum back."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        exchange(mine, 0, None, 0)
        exchange(None, 0, mine, 0)
        return
    other = torch.empty_like(mine)
    for worker in range(1, size):
        exchange(None, 0, other, worker)
        mine += other
    for worker in range(1, size):
        exchange(mine, worker, None, 0)


def by_ring(mine: Tensor) -> None:
    """Leave the sum in `mine`: each part goes round once to be added up, and once more to be copied."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = mine.chunk(size)  # views: what changes them changes `mine`
    right, left = (rank + 1) % size, (rank - 1) % size
    other = torch.empty_like(parts[0])
    for turn in range(size - 1):  # reduce-scatter: in the end rank r has the sum of part r + 1
        exchange(parts[(rank - turn) % size], right, other, left)
        parts[(rank - turn - 1) % size].add_(other)
    for turn in range(size - 1):  # all-gather
        exchange(parts[(rank - turn + 1) % size], right, parts[(rank - turn) % size], left)


def measure(name: str, add: Callable[[Tensor], None]) -> float:
    """Return the MB that the busiest rank moved."""
    global moved
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((NUMBERS,), float(rank + 1))
    moved = 0
    dist.barrier()
    start = time.perf_counter()
    add(mine)
    dist.barrier()
    seconds = time.perf_counter() - start
    assert bool((mine == size * (size + 1) / 2).all())
    busiest = torch.tensor(moved)
    dist.all_reduce(busiest, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{name}: the busiest of {size} ranks moved {busiest.item() / 1e6:.1f} MB, in {1000 * seconds:.0f} ms")
    return busiest.item() / 1e6


def main() -> None:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    assert NUMBERS % size == 0  # the parts are equal
    server, ring = measure("server", by_server), measure("ring", by_ring)
    assert abs(server - ring * size / 2) < 0.1  # 2 (W - 1) vectors against 4 (W - 1) / W
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
