"""Errors for a run that exceeds the limit on open files or processes."""

import errno
import os
from collections.abc import Mapping
from typing import Final

from lockstep.errors import PreflightError

_REASONS: Final[Mapping[int, str]] = {
    errno.EAGAIN: "this user or container has reached its limit on processes (ulimit -u)",
    errno.EMFILE: "this process has reached its limit on open files (ulimit -n)",
    errno.ENOMEM: "out of memory",
}


def make_limit_error(action: str, error: OSError) -> PreflightError:
    """Return the error to raise if `action` failed with `error`. Its message names the limit that was reached."""
    return _make_error(f"cannot {action}: {error.strerror or error}", _REASONS.get(error.errno or 0, ""))


def find_open_files_error(error: BaseException) -> PreflightError | None:
    """Return the error to raise if `error` was caused by the limit on open files, or None if it wasn't.

    This function searches for the message of EMFILE, because errors of C++ libraries such as gloo only contain the
    message.
    """
    text = os.strerror(errno.EMFILE)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError | RuntimeError) and text in str(cause):
            return _make_error(text, _REASONS[errno.EMFILE])
        cause = cause.__cause__ or cause.__context__
    return None


def _make_error(problem: str, reason: str) -> PreflightError:
    import resource  # imported here because `lockstep strategies` must work on Windows, which has no such module

    files, processes = (
        resource.getrlimit(resource_kind)[0] for resource_kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
    )
    limits = f": {reason}; the limits are {files} files and {processes} processes" if reason else ""
    return PreflightError(f"{problem}{limits}; raise the limit, or start fewer processes (placement.processes)")
