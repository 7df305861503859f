"""Translates the RuntimeError that torch raises when a peer rank is lost to PeerLostError."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch.distributed as dist

from lockstep.device.ulimits import find_open_files_error
from lockstep.errors import TransientError

# Some errors of the backends are plain RuntimeErrors. They are recognized by their text, such as the path of a source
# file of gloo.
_ERROR_MARKERS: Final = ("/gloo/", "ProcessGroupGloo", "ProcessGroupNCCL", "tensorpipe/", "RPCErr:")
# Text in the errors that gloo and NCCL raise if a collective times out.
_TIMEOUT_MESSAGES: Final = ("Timed out waiting", "collective operation timeout")
_SLOW_HINT: Final = "another rank is slow or hangs; a collective times out after placement.timeout_s"


class PeerLostError(TransientError):
    """Raised if a peer rank was lost during a collective. Look for the cause on the peer."""


@contextmanager
def translate_peer_errors() -> Iterator[None]:
    """Raise PeerLostError in place of errors of torch.distributed in the `with` block."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" in str(error):  # raised anywhere in the main thread, so not by the collective
            raise
        raise _make_peer_lost(error) from error


def find_peer_error(error: BaseException) -> PeerLostError | None:
    """Return the PeerLostError that caused an error, or None if no peer was lost.

    Follows the chain of causes, because user code can fail again in a `finally` block or raise its own error after a
    failed collective. Returns None if this process is out of file descriptors, because this is then why the collective
    failed.
    """
    if find_open_files_error(error):
        return None
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PeerLostError):
            return cause
        if _is_collective_error(cause):
            return _make_peer_lost(cause)
        cause = cause.__cause__ or cause.__context__
    # For example, the connection to the store was lost while a process group was being created.
    return _make_peer_lost(error) if isinstance(error, dist.DistError) else None


def _is_collective_error(error: BaseException) -> bool:
    return isinstance(error, dist.DistBackendError) or (
        isinstance(error, RuntimeError) and any(marker in str(error) for marker in _ERROR_MARKERS)
    )


def _make_peer_lost(error: BaseException) -> PeerLostError:
    first, *_ = *str(error).splitlines(), type(error).__name__
    timed_out = any(marker in first for marker in _TIMEOUT_MESSAGES)
    return PeerLostError(f"lost another rank during a collective ({first}){f'; {_SLOW_HINT}' if timed_out else ''}")
