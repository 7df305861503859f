"""Indexes a tar archive in WebDataset format: the key of each sample, and the positions of its files."""

import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from lockstep.common import plainfile
from lockstep.common.user_code import UserCode
from lockstep.data.streams.index import FileState, ShardIndex
from lockstep.data.streams.pipeline import Pipeline
from lockstep.errors import LockstepError, UsageError

_BLOCK: Final = tarfile.BLOCKSIZE
_METADATA: Final = re.compile(r"__[^/]*__($|/)")  # members that webdataset skips
_ARCHIVE_ADVICE: Final = "use a complete tar archive without compression"
LOCAL_PATH: Final = "__local_path__"  # newer versions of webdataset add the path of the archive to each sample


def scan_members(label: str, path: str, pipeline: Pipeline) -> ShardIndex:
    """Read the headers of an archive and return its index. The content of members isn't read.

    The grouping stage of the pipeline gets an (offset, size) pair instead of the content of each member. Nothing is
    extracted, so paths in member names are harmless. Raises UsageError if the file isn't a complete archive.
    """
    try:
        with plainfile.open_reader(Path(path), links=True) as stream:
            status = os.fstat(stream.fileno())
            file_state = FileState(path, status.st_size, str(status.st_mtime_ns))
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                samples = [*pipeline.group(_iterate_members(label, archive, path, pipeline))]
                _check_end(label, stream, archive.offset, path)
    except LockstepError:
        raise
    except (OSError, ValueError, OverflowError, tarfile.TarError) as error:
        # webdataset appends objects to the arguments of an exception. The first argument is the message.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else (error.args or (error,))[0]
        raise UsageError(f"{label}: cannot read {path} as a tar archive: {reason}; {_ARCHIVE_ADVICE}") from error
    return _build_index(samples, file_state)


def _iterate_members(label: str, archive: tarfile.TarFile, path: str, pipeline: Pipeline) -> Iterator[dict[str, Any]]:
    """Yield the regular members of an archive like webdataset's tar_file_expander, with positions instead of data."""
    local_path = {LOCAL_PATH: path} if pipeline.has_local_path else {}
    for member in archive:
        name = member.name
        if not member.isreg() or ("/" not in name and name.startswith("__") and name.endswith("__")):
            continue
        if _METADATA.match(name):
            continue
        if member.issparse():
            raise UsageError(
                f"{label}: {path}: {name} is a sparse file, which isn't supported; pack it without --sparse"
            )
        with UserCode(f"{label}: {path}: {name}"):
            name = name if pipeline.rename is None else pipeline.rename(name)
            if pipeline.select is not None and not pipeline.select(name):
                continue
        yield {"fname": name, "data": (member.offset_data, member.size), "__url__": path, **local_path}


def _check_end(label: str, stream: BinaryIO, offset: int, path: str) -> None:
    """Raise UsageError if the archive doesn't end with an empty block, which tarfile doesn't check."""
    stream.seek(offset)
    if stream.read(_BLOCK) != bytes(_BLOCK):
        raise UsageError(
            f"{label}: {path} is truncated or damaged at byte {offset:,}, where its end marker is missing; copy it "
            f"again"
        )


def _build_index(samples: list[dict[str, Any]], file_state: FileState) -> ShardIndex:
    suffixes: dict[str, int] = {}
    members = [
        (number, suffixes.setdefault(suffix, len(suffixes)), *position)
        for number, sample in enumerate(samples)
        for suffix, position in sample.items()
        if isinstance(position, tuple)
    ]
    table = np.array(members, np.int64).reshape(-1, 4)
    firsts = np.searchsorted(table[:, 0], np.arange(len(samples) + 1))
    return ShardIndex(
        len(samples),
        [file_state],
        {"firsts": firsts, "suffixes": table[:, 1], "offsets": table[:, 2], "sizes": table[:, 3]},
        {
            "keys": [sample["__key__"] for sample in samples],
            "suffixes": [*suffixes],
            "extras": [LOCAL_PATH] if samples and LOCAL_PATH in samples[0] else [],
        },
    )


def iterate_spans(index: ShardIndex, sample: int) -> Iterator[tuple[str, int, int]]:
    """Yield the suffix of each file in a sample, and its offset and size in bytes."""
    first, end = index.positions["firsts"][sample : sample + 2].tolist()
    columns = (index.positions[name][first:end].tolist() for name in ("suffixes", "offsets", "sizes"))
    for suffix, offset, size in zip(*columns, strict=True):
        yield index.names["suffixes"][suffix], offset, size


def select_samples(index: ShardIndex, kept_indices: list[int]) -> ShardIndex:
    """Return an index that contains only the samples `kept_indices` of a shard."""
    firsts = index.positions["firsts"]
    ranges = [np.arange(firsts[sample], firsts[sample + 1]) for sample in kept_indices]
    rows = np.concatenate([*ranges, np.arange(0)])
    positions = {name: array[rows] for name, array in index.positions.items() if name != "firsts"}
    positions["firsts"] = np.cumsum([0, *(len(sample_rows) for sample_rows in ranges)])
    keys = index.names["keys"]
    names = {**index.names, "keys": [keys[sample] for sample in kept_indices]}
    return ShardIndex(len(kept_indices), index.files, positions, names)
