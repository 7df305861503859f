"""Files that are whole or absent, also after a kill, a power cut or a full disk."""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lockstep.common import plainfile
from lockstep.common.platforms import reserve


@dataclass(frozen=True, slots=True)
class Written:
    """What a file holds: enough to check later whether it still does."""

    sha256: str
    bytes: int


def write(path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
    """Write a new file, hashing what passes, and return once it is on the disk. The folder is not synced."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return Written(digest.hexdigest(), size)


def allot(path: Path, head: bytes, length: int) -> None:
    """Make a new file of `length` bytes which begins with `head`, for `write_at` to fill."""
    with path.open("xb") as file:
        file.write(head)
        reserve(file.fileno(), length)  # a full disk is noticed here, not half way through


def write_at(path: Path, parts: Iterable[tuple[int, memoryview]]) -> None:
    """Write each part at its place in a file and return once it is on the disk; others may write other parts of it."""
    with path.open("r+b") as file:
        for start, data in parts:
            file.seek(start)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def hash_file(path: Path) -> Written:
    """Return what a file holds now."""
    with plainfile.reader(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return Written(digest.hexdigest(), file.tell())


def replace(path: Path, data: bytes) -> None:
    """Give `path` the content `data`: a reader, at any time, sees all of the old or all of the new."""
    temporary = _temporary(path)
    temporary.unlink(missing_ok=True)
    try:
        write(temporary, [data])
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def point(link: Path, target: str) -> None:
    """Make `link` a symbolic link to its neighbour `target`, in one move. The folder is not synced."""
    temporary = _temporary(link)
    temporary.unlink(missing_ok=True)
    os.symlink(target, temporary)
    os.replace(temporary, link)


def sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk: fsync of a file does not save the entry that names it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    # In the same folder: a rename is one move only within a file system.
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")
