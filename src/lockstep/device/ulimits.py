"""Errors for limits on open files and processes that are too low for a run."""

import errno
import os
from collections.abc import Mapping
from typing import Final

from lockstep.errors import PreflightError

_WHY: Final[Mapping[int, str]] = {
    errno.EAGAIN: "this user or this container may have no more processes (ulimit -u)",
    errno.EMFILE: "a process may open no more files (ulimit -n)",
    errno.ENOMEM: "out of memory",
}


def limit_error(what: str, error: OSError) -> PreflightError:
    """Return the error for a run that couldn't do `what` because of `error`."""
    return _error(f"cannot {what}: {error.strerror or error}", _WHY.get(error.errno or 0, ""))


def too_many_files(error: BaseException) -> PreflightError | None:
    """Return the error for a run that failed at the limit on open files, or None if it failed for a different reason.

    Errors of C++ only contain the text of the error, and can also come from communication.
    """
    text = os.strerror(errno.EMFILE)
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, OSError | RuntimeError) and text in str(each):
            return _error(text, _WHY[errno.EMFILE])
        each = each.__cause__ or each.__context__
    return None


def _error(what: str, why: str) -> PreflightError:
    import resource  # imported here because Windows has no such module but can list strategies

    files, processes = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    limits = f": {why}; now at most {files} files and {processes} processes" if why else ""
    return PreflightError(f"{what}{limits}; raise the limit, or start fewer processes (placement.processes)")
