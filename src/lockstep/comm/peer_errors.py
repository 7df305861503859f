"""Errors of lost peers: if another rank is gone, torch raises a RuntimeError, which is translated to PeerLostError."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch.distributed as dist

from lockstep.device.ulimits import too_many_files
from lockstep.errors import TransientError

# Some collectives aren't called by Lockstep, since fully_shard gathers in hooks, in forward and backward. Errors of
# gloo have no type of their own, but contain the names of its source files.
_SIGNS: Final = ("/gloo/", "ProcessGroupGloo", "ProcessGroupNCCL", "tensorpipe/", "RPCErr:")
# Texts of gloo and NCCL errors for collectives that timed out.
_TIMED_OUT: Final = ("Timed out waiting", "collective operation timeout")
_SLOW: Final = "another rank is slow or hangs; a collective times out after placement.timeout_s"


class PeerLostError(TransientError):
    """Another rank was lost during a collective. The cause is on that rank."""


@contextmanager
def translate_peer_errors() -> Iterator[None]:
    """Translate errors of torch.distributed in the block to PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" in str(error):  # torch raises this at any place in the main thread
            raise
        raise _peer_lost(error) from error


def lost_peer(error: BaseException) -> PeerLostError | None:
    """Return the PeerLostError for an error from any code, or None if no peer was lost.

    Errors that follow from the failed collective, in a `finally` or as a translation, count too. If this process can't
    open more files, returns None, because that also makes collectives fail.
    """
    if too_many_files(error):
        return None
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PeerLostError):
            return cause
        if _from_exchange(cause):
            return _peer_lost(cause)
        cause = cause.__cause__ or cause.__context__
    return _peer_lost(error) if isinstance(error, dist.DistError) else None  # the store for creating groups is gone


def _from_exchange(error: BaseException) -> bool:
    return isinstance(error, dist.DistBackendError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
    )


def _peer_lost(error: BaseException) -> PeerLostError:
    first, *_ = *str(error).splitlines(), type(error).__name__
    timed_out = any(sign in first for sign in _TIMED_OUT)
    return PeerLostError(f"lost another rank during a collective ({first}){f'; {_SLOW}' if timed_out else ''}")
