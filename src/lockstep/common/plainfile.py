"""Safe access to untrusted files: opens only regular files, without following links. Also parses untrusted JSON."""

import errno
import json
import os
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

# In bytes; a header of this size describes 150,000 tensors and takes seconds to parse.
MAX_HEADER_BYTES: Final = 1 << 24


def open_descriptor(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666, *, links: bool = False) -> int:
    """Open a file with os.open. Raises OSError if it isn't a regular file or, unless `links` is set, if it is a link.

    A link can point to any file of the user, a pipe can block, and a device may never end. Only the last component of
    the path is checked for links.
    """
    try:
        follow = 0 if links else os.O_NOFOLLOW
        file_descriptor = os.open(path, flags | follow | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise OSError(errno.ELOOP, "it is a symbolic link, expected a regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file_descriptor).st_mode):
        os.close(file_descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file_descriptor


def open_reader(path: Path, *, links: bool = False) -> BufferedReader:
    """Open a regular file for reading bytes. See `open_descriptor` for links and errors."""
    return os.fdopen(open_descriptor(path, links=links), "rb")


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a regular file. Raises OSError if it is longer than `limit` bytes. See `open_descriptor`."""
    with open_reader(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit:,} bytes", str(path))
    return data


def read_text_or_empty(path: Path) -> str:
    """Return the stripped text of a system file, e.g. in /proc. Returns "" if it can't be read, e.g. in a container."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def check_folder(folder: Path) -> None:
    """Raise OSError if a folder contains anything but regular files, folders, and links to them.

    Call this function before a library opens files in the folder, because the library would block on a pipe.
    """
    for folder_path, _, names in os.walk(folder):
        for path in (Path(folder_path, name) for name in names):
            if path.exists() and not path.is_file():
                raise OSError(errno.EINVAL, f"{path} is not a regular file")


def check_safetensors(path: Path) -> None:
    """Raise OSError if a safetensors file has a header of more than `MAX_HEADER_BYTES` bytes, which no real model has.

    The safetensors library accepts headers of up to 100 MB. Parsing such a header can take a minute and a gigabyte of
    memory.
    """
    with open_reader(path, links=True) as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise OSError(errno.EFBIG, f"its header has {length:,} bytes, more than {MAX_HEADER_BYTES:,}", str(path))


def parse_json(data: str | bytes, pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON. `pairs_hook` is the object_pairs_hook of json.loads. Raises ValueError if the JSON is invalid.

    Use this function instead of json.loads, which raises RecursionError if lists are nested too deeply.
    """
    try:
        return json.loads(data, object_pairs_hook=pairs_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
