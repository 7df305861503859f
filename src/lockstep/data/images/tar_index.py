"""The offsets of the pictures in a tar archive, and the class of each; found once and cached next to the archive."""

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
from lockstep.errors import UsageError, error_as

_VERSION: Final = 1
_MOST_CLASSES: Final = 1 << 24  # each has a name
_BLOCK: Final = tarfile.BLOCKSIZE
_LABEL: Final = 1 << 20  # bytes of a label that are read


class TarIndex(NamedTuple):
    """The pictures of `file`: their names, their (offset, size) in bytes, int64 of shape [n, 2], and their classes."""

    file: str
    names: NDArray[np.str_]
    spans: NDArray[np.int64]
    targets: NDArray[np.int64]


def load_index(file: Path, label: str) -> TarIndex:
    """Return the index of an archive, kept or new. It is kept where the folder can be written to.

    Nothing is ever unpacked, so a member's name leads nowhere; members that are no plain files are passed over.
    """
    wrong = (OSError, ValueError, OverflowError, tarfile.TarError)  # OverflowError: of numbers that no file can have
    unread = error_as(UsageError, wrong, f"data set webdataset: {file} cannot be read as a tar archive")
    with unread, plainfile.reader(file, links=True) as stream:
        found = os.fstat(stream.fileno())
        mark = np.array([_VERSION, found.st_size, found.st_mtime_ns])
        kept = file.with_name(f".{file.name}.{label}.npz") if label.isidentifier() else None
        index = None if kept is None else _read_cached(kept, file, mark)
        if index is None:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                index = _scan_archive(archive, file, label)
                _check_end(stream, archive.offset, file)
            if kept is not None:
                _write_cache(kept, index, mark)
        return index


def _read_cached(place: Path, file: Path, mark: NDArray[np.int64]) -> TarIndex | None:
    """Return the index that was kept, None where there is none of this archive as it is now."""
    try:
        with plainfile.reader(place) as stream, np.load(stream, allow_pickle=False) as arrays:
            if not np.array_equal(arrays["mark"], mark):
                return None
            found = TarIndex(str(file), arrays["names"], arrays["spans"], arrays["targets"])
    except Exception:  # of bytes that are no index NumPy and zipfile raise anything; it is found anew
        return None
    return found if len(found.names) == len(found.spans) == len(found.targets) else None


def _write_cache(place: Path, index: TarIndex, mark: NDArray[np.int64]) -> None:
    # Every rank may come here: each writes a file of its own, and the last one to rename it leaves what all have found.
    new = place.with_name(f"{place.name}.{os.getpid()}.new")
    with suppress(OSError):  # a folder that we may not write to: the archive is looked through at each start
        with open(new, "xb") as stream:
            np.savez(stream, mark=mark, names=index.names, spans=index.spans, targets=index.targets)
        os.replace(new, place)


def _check_end(stream: BinaryIO, offset: int, file: Path) -> None:
    """Raise UsageError where no empty block ends an archive: tarfile takes one that was cut off for a shorter one."""
    stream.seek(offset)
    if stream.read(_BLOCK) != bytes(_BLOCK):
        raise UsageError(
            f"data set webdataset: {file} is cut off, or damaged, at byte {offset:,}, where its end should be; copy it "
            f"again"
        )


def _scan_archive(archive: tarfile.TarFile, file: Path, label: str) -> TarIndex:
    names, spans, targets = [], [], []
    for name, parts in _samples(archive):
        picture = next((each for ending, each in parts.items() if f".{ending.lower()}" in IMAGE_SUFFIXES), None)
        if picture is None:
            continue
        names.append(name)
        spans.append((picture.offset_data, picture.size))
        targets.append(_target(archive, f"{file}: {name}", parts, label))
    if not names:
        raise UsageError(f"data set webdataset: {file} has no pictures; they end in {', '.join(IMAGE_SUFFIXES)}")
    return TarIndex(str(file), np.array(names), np.array(spans, np.int64), np.array(targets, np.int64))


def _samples(archive: tarfile.TarFile) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Yield each sample's name and its members by their endings: neighbours whose names are the same up to a dot."""
    before, parts = "", dict[str, tarfile.TarInfo]()
    for member in archive:
        if not member.isreg() or member.issparse():
            continue
        folder, slash, base = member.name.rpartition("/")
        stem, _, ending = base.partition(".")
        if not stem:  # hidden
            continue
        if f"{folder}{slash}{stem}" != before:
            if parts:
                yield before, parts
            before, parts = f"{folder}{slash}{stem}", {}
        parts[ending] = member
    if parts:
        yield before, parts


def _target(archive: tarfile.TarFile, where: str, parts: dict[str, tarfile.TarInfo], label: str) -> int:
    member = parts.get(label) or parts.get("json")
    if member is None:
        raise UsageError(f"data set webdataset: {where} has neither .{label} nor .json beside it; mend options.label")
    stream = archive.extractfile(member)
    content = stream.read(_LABEL) if stream is not None else b""
    try:
        found: Any = plainfile.parse_json(content)
        value = found[label] if isinstance(found, dict) else found
    except (ValueError, KeyError) as error:
        raise UsageError(f"data set webdataset: {member.name} of {where} has no number '{label}': {error!r}") from error
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST_CLASSES:
        raise UsageError(f"data set webdataset: {where}: its class is {value!r}; classes are whole numbers from 0")
    return value
