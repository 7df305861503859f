"""Translates the RuntimeError that torch raises when a peer rank is lost to PeerLostError."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch.distributed as dist

from lockstep.device.ulimits import too_many_files
from lockstep.errors import TransientError

# Lockstep can't wrap all collectives, because fully_shard runs collectives in hooks during forward and backward passes.
# Errors of gloo have no specific type, but contain the names of gloo's source files.
_ERROR_MARKERS: Final = ("/gloo/", "ProcessGroupGloo", "ProcessGroupNCCL", "tensorpipe/", "RPCErr:")
# Texts of gloo and NCCL errors for collectives that timed out.
_TIMEOUT_MESSAGES: Final = ("Timed out waiting", "collective operation timeout")
_SLOW_HINT: Final = "another rank is slow or hangs; a collective times out after placement.timeout_s"


class PeerLostError(TransientError):
    """A peer rank was lost during a collective. The cause of the failure is on the peer."""


@contextmanager
def translate_peer_errors() -> Iterator[None]:
    """Translate errors of torch.distributed within the block to PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" in str(error):  # torch can raise this error anywhere in the main thread
            raise
        raise _make_peer_lost(error) from error


def find_peer_error(error: BaseException) -> PeerLostError | None:
    """Return the PeerLostError for an error from any code, or None if no peer was lost.

    This includes errors that follow from a failed collective: in a `finally` block, or as its translation. Returns None
    if this process can't open more files, because then the collective failed for this reason.
    """
    if too_many_files(error):
        return None
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PeerLostError):
            return cause
        if _is_collective_error(cause):
            return _make_peer_lost(cause)
        cause = cause.__cause__ or cause.__context__
    return (
        _make_peer_lost(error) if isinstance(error, dist.DistError) else None
    )  # e.g. lost the store while creating groups


def _is_collective_error(error: BaseException) -> bool:
    return isinstance(error, dist.DistBackendError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _ERROR_MARKERS)
    )


def _make_peer_lost(error: BaseException) -> PeerLostError:
    first, *_ = *str(error).splitlines(), type(error).__name__
    timed_out = any(sign in first for sign in _TIMEOUT_MESSAGES)
    return PeerLostError(f"lost another rank during a collective ({first}){f'; {_SLOW_HINT}' if timed_out else ''}")
