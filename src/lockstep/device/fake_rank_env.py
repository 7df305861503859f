"""Lets code in this process believe that it is one rank of several: to see whether what it computes depends on that."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import torch.distributed as dist

_RANKS: Final = ("RANK", "LOCAL_RANK")
_SIZES: Final = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """While the block runs, torch.distributed and the environment say that this is rank `rank` of `size`.

    No process group may exist. Collectives return at once and communicate nothing, so their results mean nothing.
    """
    # Importing it registers torch's backend "fake"; torch's own tests use it, hence the place.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before = {name: os.environ[name] for name in (*_RANKS, *_SIZES) if name in os.environ}
    os.environ.update({**dict.fromkeys(_RANKS, str(rank)), **dict.fromkeys(_SIZES, str(size))})
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore(), timeout=timedelta(seconds=10))
    try:
        yield
    finally:
        dist.destroy_process_group()
        not_a_rank()
        os.environ.update(before)


def not_a_rank() -> None:
    """Let the environment say nothing of ranks from now on."""
    for name in (*_RANKS, *_SIZES):
        os.environ.pop(name, None)
