"""Decodes images once, into WebDataset tar archives of pixels that return the same samples."""

import io
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Final

from lockstep.common.platforms import usable_cores
from lockstep.data.images.crops import short_side
from lockstep.data.images.decoding import as_ppm
from lockstep.data.images.pictures import PictureSplit, resize

ARCHIVE_BYTES: Final = 1 << 30  # once an archive is larger, the next one is started
_AHEAD: Final = 16  # images per core to decode at a time
_LONGEST: Final = 100  # the number of characters to keep of an image's name


def write_archives(split: PictureSplit, folder: Path, part: str, shorter: int | None = None) -> Iterator[int]:
    """Write the images of a split to `folder/part-00000.tar` and so on. Yields the number of completed images.

    Images are stored upright. If `shorter` is set, images with a longer short side are resized to it. If an image can't
    be decoded, raises DataError. If the recipe skips such images, writes an empty file, which is skipped again when you
    read the archive.
    """
    names = (folder / f"{part}-{number:05d}.tar" for number in count())
    archive = None
    with ThreadPoolExecutor(cores := usable_cores()) as pool, ExitStack() as stack:
        for first in range(0, len(split), _AHEAD * cores):
            block = range(first, min(first + _AHEAD * cores, len(split)))
            for index, content in zip(
                block, pool.map(lambda number: _pixels(split, number, shorter), block), strict=True
            ):
                if archive is None or archive.offset >= ARCHIVE_BYTES:
                    stack.close()
                    archive = stack.enter_context(tarfile.open(next(names), "w"))
                name = _member(index, split.name(index))
                _add(archive, f"{name}.ppm", content)
                _add(archive, f"{name}.cls", str(split.target(index)).encode())
                yield index + 1


def _pixels(split: PictureSplit, index: int, shorter: int | None) -> bytes:
    picture = split.picture(index)
    if picture is None:
        return b""
    _, height, width = picture.shape
    if shorter is not None and min(height, width) > shorter:
        picture = resize(picture, *short_side(height, width, shorter))
    return as_ppm(picture)


def _member(index: int, name: str) -> str:
    """Return the name of an image's members without their suffix: its index, and a name that users recognize."""
    stem = Path(name).stem.replace(".", "_")
    return f"{index:08d} {''.join(character if character.isprintable() else '_' for character in stem)[:_LONGEST]}"


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
