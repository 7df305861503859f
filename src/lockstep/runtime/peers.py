"""When another rank goes away, torch raises a RuntimeError in the middle of an exchange: here it gets a name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.errors import TrainingError


class PeerLostError(TrainingError):
    """Another rank went away in the middle of an exchange; the cause is with that rank."""


@contextmanager
def naming_lost_peers() -> Iterator[None]:
    """Turn what torch.distributed raises inside the block into PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" in str(error):  # torch raises that wherever the main thread is
            raise
        first, *_ = *str(error).splitlines(), type(error).__name__
        raise PeerLostError(f"lost another rank during an exchange ({first})") from error
