# $ torchrun --standalone --nproc-per-node=3 tutorial/19-mistakes/barriers.py
"""Some ranks wait in the barrier of their group, others in that of the world; a third barrier names who is missing."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

SOON = timedelta(seconds=2)


def error_of(wait: Callable[[], object]) -> str:
    """Return the error of waiting for ranks that never come."""
    try:
        wait()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("all came")


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    last = size - 1
    group: Any = dist.new_group([last])
    world: Any = dist.new_group(timeout=SOON)  # all ranks, but less patient than 30 minutes
    if rank == last:
        dist.barrier(group=group)  # all members are here: it goes on
    else:
        error_of(lambda: dist.barrier(group=world))  # the members never come here
    if rank == 0 < last:
        print("barrier(group) for its members, barrier() for the others: an error after the timeout")
    dist.barrier()  # all ranks, once each
    if rank != last:
        named = error_of(lambda: dist.monitored_barrier(timeout=SOON))
        if rank == 0:
            assert f"Rank {last}" in named, named
            print(f"  monitored_barrier() for the others: its error names rank {last}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
