"""Simulates one rank of a larger job in this process, to check whether results of user code depend on the rank."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import torch.distributed as dist

_RANK_VARIABLES: Final = ("RANK", "LOCAL_RANK")
_SIZE_VARIABLES: Final = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")


@contextmanager
def simulate_rank(rank: int, size: int) -> Iterator[None]:
    """Simulate rank `rank` of `size` in torch.distributed and in the environment variables during the `with` block.

    No process group may be initialized. Collectives return immediately without communicating, so their results are
    meaningless.
    """
    # Importing this internal module of torch registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before = {name: os.environ[name] for name in (*_RANK_VARIABLES, *_SIZE_VARIABLES) if name in os.environ}
    os.environ.update({**dict.fromkeys(_RANK_VARIABLES, str(rank)), **dict.fromkeys(_SIZE_VARIABLES, str(size))})
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore(), timeout=timedelta(seconds=10))
    try:
        yield
    finally:
        dist.destroy_process_group()
        remove_rank_variables()
        os.environ.update(before)


def remove_rank_variables() -> None:
    """Remove RANK, WORLD_SIZE and the variables for the local rank and size from the environment."""
    for name in (*_RANK_VARIABLES, *_SIZE_VARIABLES):
        os.environ.pop(name, None)
