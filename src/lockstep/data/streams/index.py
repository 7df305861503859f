"""Indexes the samples of a shard: their positions, and the state of the files. Indexes are cached on disk."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.common import plainfile
from lockstep.common.patterns import list_some
from lockstep.errors import DataError

_VERSION: Final = 1
_REMOTE_VERSIONS: Final = ("ETag", "etag", "blob_id", "mtime", "last_modified", "LastModified", "created")
_RESTART_ADVICE: Final = "start the run again, and don't change the shards while it is running"


class FileState(NamedTuple):
    """The state of a file: its size in bytes, and its modification time or the version that a server reports."""

    path: str
    size: int
    version: str

    @property
    def is_local(self) -> bool:
        """Whether the file is on a file system of this host."""
        return "://" not in self.path


@dataclass(frozen=True)
class ShardIndex:
    """The samples of a shard.

    - `num_samples`: The number of samples.
    - `files`: The state of the files of the shard when it was indexed.
    - `positions`: The positions of the samples in the files, as int64 arrays. The arrays depend on the type of shard.
    - `names`: The names in the shard, such as sample keys. The lists depend on the type of shard.
    """

    num_samples: int
    files: Sequence[FileState] = ()
    positions: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the index as JSON-serializable values."""
        positions = {name: array.tolist() for name, array in self.positions.items()}
        names = {name: [*values] for name, values in self.names.items()}
        return {"samples": self.num_samples, "files": [[*file] for file in self.files], "positions": positions} | {
            "names": names
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "ShardIndex":
        """Restore an index from the result of `to_json`."""
        positions = {name: np.array(array, np.int64) for name, array in value["positions"].items()}
        return ShardIndex(value["samples"], [FileState(*file) for file in value["files"]], positions, value["names"])

    def compute_digest(self, ignored: Iterable[str] = ()) -> str:
        """Return a digest of the samples, which doesn't depend on the paths of the files or on `ignored` positions."""
        positions = {name: array.tolist() for name, array in self.positions.items() if name not in ignored}
        names = {name: [*values] for name, values in self.names.items()}
        return hashlib.sha256(json.dumps([self.num_samples, positions, names]).encode()).hexdigest()


def get_file_state(path: str) -> FileState:
    """Return the current state of a file. Raises OSError if a local file doesn't exist.

    If the state of a remote file is unknown, its size is -1.
    """
    if "://" not in path:
        status = os.stat(path)
        return FileState(path, status.st_size, str(status.st_mtime_ns))
    try:
        import fsspec  # a dependency of datasets

        system, name = fsspec.core.url_to_fs(path)
        info = system.info(name)
    except Exception:  # file systems of fsspec may raise any exception
        return FileState(path, -1, "")
    versions = [str(info[key]) for key in _REMOTE_VERSIONS if info.get(key)]
    return FileState(path, int(info.get("size") or -1), " ".join(versions))


def check_unchanged(indexed_state: FileState, current: FileState | None = None) -> None:
    """Raise DataError if a file has changed since it was indexed. If `current` is None, its current state is read."""
    if current is None:
        try:
            current = get_file_state(indexed_state.path)
        except OSError as error:
            raise DataError(
                f"{indexed_state.path}: became unreadable after it was indexed: {error.strerror}; {_RESTART_ADVICE}"
            ) from error
    if current.size != indexed_state.size:
        raise DataError(
            f"{indexed_state.path}: changed after it was indexed, from {indexed_state.size:,} to {current.size:,} "
            f"bytes; {_RESTART_ADVICE}"
        )
    if current.version != indexed_state.version:
        raise DataError(
            f"{indexed_state.path}: changed after it was indexed: it still has {indexed_state.size:,} bytes, but was "
            f"written again; {_RESTART_ADVICE}"
        )


def load_or_scan(cache: Path | None, files: Sequence[FileState], scan: Callable[[], ShardIndex]) -> ShardIndex:
    """Return the cached index of a shard, or scan the shard if there is no cache or `files` have changed.

    The new index is then cached. Pass None as `cache` if the index can't be cached.
    """
    if cache is None:
        return scan()
    index = _read_cached(cache, files)
    if index is None:
        index = scan()
        _write_cache(cache, index)
    return index


def format_paths(files: Sequence[FileState]) -> str:
    """Return the paths of files for messages."""
    return list_some([file.path for file in files], 3)


def _read_cached(cache: Path, files: Sequence[FileState]) -> ShardIndex | None:
    """Return the cached index, or None if it doesn't exist or the files have changed."""
    try:
        with plainfile.open_reader(cache) as stream, np.load(stream, allow_pickle=False) as arrays:
            if str(arrays["mark"]) != _serialize_file_states(files):
                return None
            texts = plainfile.parse_json(str(arrays["names"]))
            positions = {name.removeprefix("at_"): arrays[name] for name in arrays if name.startswith("at_")}
            return ShardIndex(int(arrays["samples"]), files, positions, texts)
    except Exception:  # for invalid bytes, NumPy and zipfile may raise any exception
        return None


def _write_cache(cache: Path, index: ShardIndex) -> None:
    """Cache an index if the folder is writable.

    Several ranks may write the cache at the same time. Each rank writes the same content to its own temporary file, and
    then replaces the cache atomically.
    """
    new = cache.with_name(f"{cache.name}.{os.getpid()}.new")
    positions = {f"at_{name}": array for name, array in index.positions.items()}
    names = json.dumps({name: [*values] for name, values in index.names.items()})
    with suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        with open(new, "xb") as stream:
            np.savez(
                stream,
                mark=np.array(_serialize_file_states(index.files)),
                samples=np.array(index.num_samples),
                names=np.array(names),
                **positions,  # type: ignore[arg-type]
            )
        os.replace(new, cache)


def _serialize_file_states(files: Sequence[FileState]) -> str:
    return json.dumps([_VERSION, *([*file] for file in files)])
