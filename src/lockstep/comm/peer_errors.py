"""When another rank goes away, torch raises a RuntimeError in the middle of an exchange: here it gets a name."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch.distributed as dist

from lockstep.device.ulimits import too_many_files
from lockstep.errors import TransientError

# Not every exchange is ours: fully_shard gathers in hooks, in forward and backward. What gloo raises there has no type
# of its own, but names its source files.
_SIGNS: Final = ("/gloo/", "ProcessGroupGloo", "ProcessGroupNCCL", "tensorpipe/", "RPCErr:")
# What gloo and NCCL say of an exchange that has timed out.
_TIMED_OUT: Final = ("Timed out waiting", "collective operation timeout")
_SLOW: Final = "another rank is slow or hangs; an exchange waits for it as long as placement.timeout_s"


class PeerLostError(TransientError):
    """Another rank went away in the middle of an exchange; the cause is with that rank."""


@contextmanager
def translate_peer_errors() -> Iterator[None]:
    """Turn what torch.distributed raises inside the block into PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" in str(error):  # torch raises that wherever the main thread is
            raise
        raise _peer_lost(error) from error


def lost_peer(error: BaseException) -> PeerLostError | None:
    """Return the lost peer that an error is about, whatever code raised it, or None.

    What follows from the end of an exchange, in a `finally` or as a translation, is about the same. An exchange also
    fails where this process may open no more files.
    """
    if too_many_files(error):
        return None
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, PeerLostError):
            return each
        if _from_exchange(each):
            return _peer_lost(each)
        each = each.__cause__ or each.__context__
    return _peer_lost(error) if isinstance(error, dist.DistError) else None  # the store where groups are made is gone


def _from_exchange(error: BaseException) -> bool:
    return isinstance(error, dist.DistBackendError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
    )


def _peer_lost(error: BaseException) -> PeerLostError:
    first, *_ = *str(error).splitlines(), type(error).__name__
    timed_out = any(sign in first for sign in _TIMED_OUT)
    return PeerLostError(f"lost another rank during an exchange ({first}){f'; {_SLOW}' if timed_out else ''}")
