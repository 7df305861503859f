"""Converts images to WebDataset tar archives of decoded pixels, without changing the samples of the dataset."""

import io
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Final

from lockstep.common.platforms import count_usable_cores
from lockstep.data.images.crops import compute_resized_shape
from lockstep.data.images.decoding import encode_ppm
from lockstep.data.images.lazy_images import ImageSplit, resize_image

ARCHIVE_BYTES: Final = 1 << 30  # once an archive reaches this size, a new one is started
_IMAGES_PER_CORE: Final = 16  # number of images per core that are decoded at a time
_MAX_NAME_LENGTH: Final = 100  # longer image names are truncated


def write_archives(
    split: ImageSplit, folder: Path, split_name: str, max_short_side: int | None = None
) -> Iterator[int]:
    """Write the images of a split to `folder/<split_name>-00000.tar` and so on. Yield the number of completed images.

    Images are stored upright. If `max_short_side` is set, larger images are resized so that their short side has this
    length. Raises DataError if an image can't be decoded. If the recipe skips damaged images, an empty file is written
    instead, so that runs on the archives also skip these images.
    """
    names = (folder / f"{split_name}-{number:05d}.tar" for number in count())
    archive = None
    with ThreadPoolExecutor(cores := count_usable_cores()) as pool, ExitStack() as stack:
        for first in range(0, len(split), _IMAGES_PER_CORE * cores):
            block = range(first, min(first + _IMAGES_PER_CORE * cores, len(split)))
            for index, content in zip(
                block, pool.map(lambda number: _encode_image(split, number, max_short_side), block), strict=True
            ):
                if archive is None or archive.offset >= ARCHIVE_BYTES:
                    stack.close()
                    archive = stack.enter_context(tarfile.open(next(names), "w"))
                name = _make_member_name(index, split.get_name(index))
                _add_member(archive, f"{name}.ppm", content)
                _add_member(archive, f"{name}.cls", str(split.get_target(index)).encode())
                yield index + 1


def _encode_image(split: ImageSplit, index: int, max_short_side: int | None) -> bytes:
    image = split.load_image(index)
    if image is None:
        return b""
    _, height, width = image.shape
    if max_short_side is not None and min(height, width) > max_short_side:
        image = resize_image(image, *compute_resized_shape(height, width, max_short_side))
    return encode_ppm(image)


def _make_member_name(index: int, name: str) -> str:
    """Return an image's name in the archive, without a suffix: its index, followed by its original name."""
    stem = Path(name).stem.replace(".", "_")
    return (
        f"{index:08d} {''.join(character if character.isprintable() else '_' for character in stem)[:_MAX_NAME_LENGTH]}"
    )


def _add_member(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
