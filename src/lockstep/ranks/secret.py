"""The secret of a job, with which ranks sign the values that they write to the rendezvous store."""

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lockstep.common.rank import SECRET
from lockstep.errors import UsageError, convert_os_error

_FILE: Final = f"{SECRET}_FILE"
_MIN_SECRET_BYTES: Final = 16
_MAX_SECRET_BYTES: Final = 4096
_ADVICE: Final = f"create a secret with (umask 077; openssl rand -hex 32 > FILE), and set {_FILE}=FILE on all ranks"


def generate_secret() -> str:
    """Generate a random job secret of 64 hex digits."""
    return secrets.token_hex(32)


def read_job_secret(env: Mapping[str, str]) -> bytes:
    """Return the job secret, or b"" if there is none.

    The secret is the value of LOCKSTEP_JOB_SECRET, or the content of the file that LOCKSTEP_JOB_SECRET_FILE names. The
    file must be owned by this user, and other users must not have access to it. Otherwise, or if the secret is too
    short, too long or not a single line, raises UsageError.
    """
    if SECRET in env:
        return _check_secret(SECRET, os.fsencode(env[SECRET]))
    if _FILE not in env:
        return b""
    path = Path(env[_FILE])
    as_usage_error = convert_os_error(UsageError, f"{_FILE} {path}", f"; {_ADVICE}")
    # Without O_NONBLOCK, opening a FIFO would block.
    with as_usage_error, os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise UsageError(f"{_FILE} {path}: must be a file that you own and only you can access; {_ADVICE}")
        return _check_secret(f"{_FILE} {path}", file.read(_MAX_SECRET_BYTES + 1).strip())


def _check_secret(source_name: str, secret: bytes) -> bytes:
    if b"\n" in secret or b"\0" in secret:
        raise UsageError(f"{source_name}: contains a line break or a NUL byte; {_ADVICE}")
    if not _MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        raise UsageError(
            f"{source_name}: expected {_MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES} bytes, got {len(secret)}; {_ADVICE}"
        )
    return secret
