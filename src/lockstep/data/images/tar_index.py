"""Indexes the images in a tar archive by offset and class. The index is cached next to the archive."""

import os
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.common import plainfile
from lockstep.data.images.scan import IMAGE_SUFFIXES
from lockstep.data.streams.index import FileState
from lockstep.errors import UsageError, convert_error

_VERSION: Final = 1
_MAX_CLASSES: Final = 1 << 24  # limits the memory for the class names
_BLOCK: Final = tarfile.BLOCKSIZE
_MAX_LABEL_BYTES: Final = 1 << 20  # maximum size of a label file


class TarIndex(NamedTuple):
    """The images in the archive `file`, with their names, spans and classes.

    `spans` contains the offset and size of each image in bytes, int64 of shape [n, 2]. `file_state` is the state of the
    archive when it was indexed.
    """

    file: str
    file_state: FileState
    names: NDArray[np.str_]
    spans: NDArray[np.int64]
    targets: NDArray[np.int64]


def load_index(file: Path, label: str) -> TarIndex:
    """Load the index of an archive from the cache, or scan the archive and cache the index if the folder is writable.

    The archive is never extracted, so member names with `..` or absolute paths are harmless. Members that aren't
    regular files are ignored. Raises UsageError if the file can't be read as a tar archive.
    """
    # tarfile raises OverflowError if a header contains a very large number.
    error_types = (OSError, ValueError, OverflowError, tarfile.TarError)
    problem = f"dataset webdataset: cannot read {file} as a tar archive"
    read_errors = convert_error(UsageError, error_types, problem, "; use a complete archive without compression")
    with read_errors, plainfile.open_reader(file, links=True) as stream:
        status = os.fstat(stream.fileno())
        fingerprint = np.array([_VERSION, status.st_size, status.st_mtime_ns])
        cache = file.with_name(f".{file.name}.{label}.npz") if label.isidentifier() else None
        index = None if cache is None else _read_cached(cache, file, fingerprint)
        if index is None:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                state = FileState(str(file), status.st_size, str(status.st_mtime_ns))
                index = _scan_archive(archive, state, label)
                _check_end(stream, archive.offset, file)
            if cache is not None:
                _write_cache(cache, index, fingerprint)
        return index


def _read_cached(cache_file: Path, file: Path, archive_fingerprint: NDArray[np.int64]) -> TarIndex | None:
    """Return the cached index, or None if there is no cache or the archive has changed."""
    try:
        with plainfile.open_reader(cache_file) as stream, np.load(stream, allow_pickle=False) as arrays:
            if not np.array_equal(arrays["mark"], archive_fingerprint):
                return None
            state = FileState(str(file), int(archive_fingerprint[1]), str(archive_fingerprint[2]))
            index = TarIndex(str(file), state, arrays["names"], arrays["spans"], arrays["targets"])
    except Exception:  # NumPy and zipfile may raise any exception for invalid bytes
        return None
    return index if len(index.names) == len(index.spans) == len(index.targets) else None


def _write_cache(cache_file: Path, index: TarIndex, archive_fingerprint: NDArray[np.int64]) -> None:
    # All ranks may write the cache at the same time. Each rank writes the same content to its own temporary file, and
    # then replaces the cache atomically.
    new = cache_file.with_name(f"{cache_file.name}.{os.getpid()}.new")
    with suppress(OSError):  # if the folder isn't writable, the archive is scanned at each start
        with open(new, "xb") as stream:
            np.savez(stream, mark=archive_fingerprint, names=index.names, spans=index.spans, targets=index.targets)
        os.replace(new, cache_file)


def _check_end(stream: BinaryIO, offset: int, file: Path) -> None:
    """Raise UsageError if the archive doesn't end with an empty block. tarfile doesn't detect such truncation."""
    stream.seek(offset)
    if stream.read(_BLOCK) != bytes(_BLOCK):
        raise UsageError(
            f"dataset webdataset: {file} is truncated or damaged at byte {offset:,}, where its end marker is missing; "
            f"copy it again"
        )


def _scan_archive(archive: tarfile.TarFile, file_state: FileState, label: str) -> TarIndex:
    file = file_state.path
    names, spans, targets = [], [], []
    for name, members in _group_members(archive):
        image = next((member for suffix, member in members.items() if f".{suffix.lower()}" in IMAGE_SUFFIXES), None)
        if image is None:
            continue
        names.append(name)
        spans.append((image.offset_data, image.size))
        targets.append(_read_target(archive, f"{file}: {name}", members, label))
    if not names:
        raise UsageError(f"dataset webdataset: {file} has no images; add files that end in {', '.join(IMAGE_SUFFIXES)}")
    return TarIndex(file, file_state, np.array(names), np.array(spans, np.int64), np.array(targets, np.int64))


def _group_members(archive: tarfile.TarFile) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Yield the name of each sample, and a dict from suffix to member.

    A sample consists of consecutive members with the same name up to the first dot.
    """
    sample, members = "", dict[str, tarfile.TarInfo]()
    for member in archive:
        if not member.isreg() or member.issparse():
            continue
        folder, slash, base = member.name.rpartition("/")
        stem, _, suffix = base.partition(".")
        if not stem:  # a hidden file
            continue
        if f"{folder}{slash}{stem}" != sample:
            if members:
                yield sample, members
            sample, members = f"{folder}{slash}{stem}", {}
        members[suffix] = member
    if members:
        yield sample, members


def _read_target(archive: tarfile.TarFile, location: str, members: dict[str, tarfile.TarInfo], label_key: str) -> int:
    member = members.get(label_key) or members.get("json")
    if member is None:
        raise UsageError(
            f"dataset webdataset: {location} has neither a .{label_key} nor a .json file; correct "
            "recipe.data.options.label"
        )
    stream = archive.extractfile(member)
    content = stream.read(_MAX_LABEL_BYTES) if stream is not None else b""
    try:
        parsed: Any = plainfile.parse_json(content)
        value = parsed[label_key] if isinstance(parsed, dict) else parsed
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"dataset webdataset: {location}: {member.name} has no integer '{label_key}': {error!r}; correct the file "
            "or recipe.data.options.label"
        ) from error
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_CLASSES:
        raise UsageError(
            f"dataset webdataset: {location}: expected a class from 0 to {_MAX_CLASSES - 1:,}, got {value!r}; correct "
            f"the file"
        )
    return value
