"""Reads and writes digests.bin, which contains digests of each step's reduced gradients and of saved weights.

All numbers are 64-bit little-endian integers. The file starts with b"lockstep" and the version of the format. Records
of 16 bytes follow, ordered by step. A record consists of the number of completed updates and the digest. The highest
bit of the first number is set if it is a digest of weights. A resumed run first removes the records of the steps that
it repeats.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lockstep.common import plainfile
from lockstep.errors import HostError, UsageError, convert_os_error
from lockstep.training.digests import Digest

DIGESTS: Final = "digests.bin"
_HEADER: Final = b"lockstep\1\0\0\0\0\0\0\0"
_RECORD_BYTES: Final = 16  # bytes per record
_WEIGHTS_BIT: Final = 1 << 63


def truncate(path: Path, step: int, warn: Callable[[str], object] = str) -> None:
    """Remove all digests after `step`, so that a run can resume from this step. If the file doesn't exist, create it.

    An invalid file is replaced with an empty file, with a warning. Raises HostError if the file can't be written.
    """
    try:
        records = _read_records(path)
    except UsageError as error:
        records = _parse_records(b"")
        warn(f"{error}; replaced by a new file")
    kept_records = records[: np.searchsorted(records[:, 0] % _WEIGHTS_BIT, step, side="right")]
    writing = convert_os_error(HostError, f"{path}: not written")
    with writing, os.fdopen(plainfile.open_descriptor(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
        file.truncate(len(_HEADER) + kept_records.nbytes)
        file.write(_HEADER)


def append(path: Path, digests: Sequence[Digest]) -> None:
    """Append digests of later steps to the file. Raises HostError if the file can't be written."""
    records = np.array([(digest.step | digest.is_weights * _WEIGHTS_BIT, digest.value) for digest in digests], "<u8")
    writing = convert_os_error(HostError, f"{path}: digests not written")
    with writing, os.fdopen(plainfile.open_descriptor(path, os.O_WRONLY | os.O_APPEND), "wb") as file:
        file.write(records.tobytes())


def read(path: Path) -> list[Digest]:
    """Return all digests in the file in order. Raises UsageError if the file can't be read or isn't a digest file."""
    return [Digest(step % _WEIGHTS_BIT, value, step >= _WEIGHTS_BIT) for step, value in _read_records(path).tolist()]


def _read_records(path: Path) -> NDArray[np.uint64]:
    """Read the records of a file. A missing file has no records. Ignores an incomplete record at the end."""
    head, data = _HEADER, b""
    reading = convert_os_error(UsageError, f"{path}: cannot be read")
    with reading, suppress(FileNotFoundError), plainfile.open_reader(path) as file:
        head, data = file.read(len(_HEADER)), file.read()
    if head != _HEADER:
        problem = "written by a newer version" if head.startswith(_HEADER[:8]) else "not a digest file"
        raise UsageError(f"{path}: {problem}")
    return _parse_records(data)


def _parse_records(data: bytes) -> NDArray[np.uint64]:
    """Return the complete records as an array of shape [n, 2]."""
    return np.frombuffer(data[: len(data) // _RECORD_BYTES * _RECORD_BYTES], "<u8").reshape(-1, 2)
