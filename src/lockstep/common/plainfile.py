"""Reads what others may have written: plain files only, which have an end, never through a link; and JSON."""

import errno
import json
import os
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

LARGEST_HEADER: Final = 1 << 24  # bytes of a safetensors header: about 150,000 tensors, read in some seconds


def descriptor(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666, *, links: bool = False) -> int:
    """Open `path` as os.open does; OSError where it is no regular file, or, without `links`, its last part is a link.

    A link may lead to any file of the user's, a pipe keeps its reader waiting, and a device may never end.
    """
    try:
        follow = 0 if links else os.O_NOFOLLOW
        opened = os.open(path, flags | follow | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise OSError(errno.ELOOP, "it is a symbolic link, where a file is expected", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return opened


def reader(path: Path, *, links: bool = False) -> BufferedReader:
    """Open `path` to read its bytes; see `descriptor`."""
    return os.fdopen(descriptor(path, links=links), "rb")


def content(path: Path, limit: int) -> bytes:
    """Return the bytes of a file of at most `limit`; OSError where it is larger; see `descriptor`."""
    with reader(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit:,} bytes", str(path))
    return data


def shown_text(path: Path) -> str:
    """Return what a file of the system shows, as below /proc and /sys; "" where it does not, as in a container."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def check_folder(folder: Path) -> None:
    """Raise OSError where something below `folder`, links followed, is neither a regular file nor a folder.

    For libraries that open a folder's files themselves, and would wait for a pipe.
    """
    for above, _, names in os.walk(folder):
        for path in (Path(above, name) for name in names):
            if path.exists() and not path.is_file():
                raise OSError(errno.EINVAL, f"{path} is not a regular file")


def check_safetensors(path: Path) -> None:
    """Raise OSError where a file's header of safetensors is larger than any model's.

    The library takes 100 MB of it, which may name a million tensors: a minute and a gigabyte before anything is known.
    """
    with reader(path, links=True) as file:
        length = int.from_bytes(file.read(8), "little")
    if length > LARGEST_HEADER:
        raise OSError(errno.EFBIG, f"its header says it has {length:,} bytes, more than {LARGEST_HEADER:,}", str(path))


def parse_json(data: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return what JSON holds, each of its objects as `pairs` makes it; ValueError for all that cannot be read.

    json.loads lets RecursionError through where lists are nested so deeply that Python gives up: nothing else calls it.
    """
    try:
        return json.loads(data, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
