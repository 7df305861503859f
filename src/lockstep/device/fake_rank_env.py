"""Simulates one rank of a larger job in this process, to check whether results of user code depend on the rank."""

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
    """Within the block, torch.distributed and the environment report that this process is rank `rank` of `size`.

    There must be no process group yet. Collectives return immediately without communication, so their results are
    meaningless.
    """
    # The import registers the backend "fake". The module is internal to torch, which uses it in its own tests.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before = {name: os.environ[name] for name in (*_RANKS, *_SIZES) if name in os.environ}
    os.environ.update({**dict.fromkeys(_RANKS, str(rank)), **dict.fromkeys(_SIZES, str(size))})
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore(), timeout=timedelta(seconds=10))
    try:
        yield
    finally:
        dist.destroy_process_group()
        remove_rank_variables()
        os.environ.update(before)


def remove_rank_variables() -> None:
    """Remove the variables that describe a rank from the environment."""
    for name in (*_RANKS, *_SIZES):
        os.environ.pop(name, None)
