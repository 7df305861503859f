"""Signs the manifests of checkpoints with a private key of the user. Nobody else can create a valid manifest."""

import hashlib
import hmac
import os
import stat
from pathlib import Path
from typing import Final

from lockstep.errors import UsageError, convert_os_error

_MIN_KEY_BYTES: Final = 32  # a shorter key could be guessed
_MAX_KEY_BYTES: Final = 4096
_KEY_ADVICE: Final = "create a key with: (umask 077; head -c 32 /dev/urandom > FILE)"
# Prevents the reuse of a signature that was made with this key for other data.
_PURPOSE: Final = b"lockstep checkpoint manifest\n"


def read_signing_key(file: str | None) -> bytes | None:
    """Return the key that signs the checkpoints of a run, or None if run.key_file isn't set."""
    return read_key(Path(file)) if file is not None else None


def read_key(path: Path) -> bytes:
    """Return the key in a file. Raise UsageError if the file is accessible to other users, or doesn't contain a key."""
    with convert_os_error(UsageError, f"run.key_file {path}: cannot be read"):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"run.key_file {path}: not a regular file; {_KEY_ADVICE}")
        if status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
            raise UsageError(
                f"run.key_file {path}: other users can access it (mode {stat.S_IMODE(status.st_mode):04o}, owner "
                f"{status.st_uid}); run chmod 600 {path}, or create a new key if another user may have read it"
            )
        key = os.read(descriptor, _MAX_KEY_BYTES + 1)
    finally:
        os.close(descriptor)
    if not _MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES:
        raise UsageError(
            f"run.key_file {path}: expected {_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} bytes, got {len(key)}; {_KEY_ADVICE}"
        )
    return key


def sign(key: bytes, data: bytes) -> str:
    """Return the HMAC-SHA256 of the text of a manifest, as a hexadecimal string."""
    return hmac.new(key, _PURPOSE + data, hashlib.sha256).hexdigest()


def is_signed(key: bytes, data: bytes, claimed: str) -> bool:
    """Return whether `claimed` is the signature of `data`. Compares in constant time."""
    return hmac.compare_digest(sign(key, data).encode(), claimed.encode())
