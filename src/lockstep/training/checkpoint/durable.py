"""Atomic writes: a file is complete or absent, even after a kill, a power failure or a full disk."""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lockstep.common import plainfile
from lockstep.common.platforms import reserve_disk_space


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The hash and size of a written file, for verifying the file later."""

    sha256: str
    bytes: int


def write(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file, sync it to disk, and return its hash and size. The folder isn't synced."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(digest.hexdigest(), size)


def create_preallocated(path: Path, header: bytes, num_bytes: int) -> None:
    """Create a new file of `num_bytes` bytes that starts with `header`. `write_at` writes the rest."""
    with path.open("xb") as file:
        file.write(header)
        reserve_disk_space(file.fileno(), num_bytes)  # detects a full disk here, not in the middle of writing


def write_at(path: Path, chunks: Iterable[tuple[int, memoryview]]) -> None:
    """Write each chunk at its offset in a file, and sync the file to disk. Ranks can write to a file concurrently."""
    with path.open("r+b") as file:
        for start, data in chunks:
            file.seek(start)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def hash_file(path: Path) -> FileRecord:
    """Return the current hash and size of a file."""
    with plainfile.open_reader(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(digest.hexdigest(), file.tell())


def replace(path: Path, data: bytes) -> None:
    """Atomically replace the content of `path` with `data`. A reader sees either the old or the new content."""
    temporary = _make_temporary_path(path)
    temporary.unlink(missing_ok=True)
    try:
        write(temporary, [data])
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def replace_link(link: Path, target: str) -> None:
    """Atomically make `link` a symbolic link to `target`, which is in the same folder. The folder isn't synced."""
    temporary = _make_temporary_path(link)
    temporary.unlink(missing_ok=True)
    os.symlink(target, temporary)
    os.replace(temporary, link)


def sync_folder(path: Path) -> None:
    """Sync the directory entries of a folder to disk. Calling fsync on a file doesn't sync its directory entry."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_temporary_path(path: Path) -> Path:
    # The temporary file must be in the same folder, because a rename is atomic only within a file system.
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")
