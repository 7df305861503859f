"""Datasets of image files with one folder per class, as in ImageNet."""

import errno
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

import numpy as np
import torch

from lockstep.common import plainfile
from lockstep.common.text import printable_line
from lockstep.data.base import DataSet
from lockstep.data.images.lazy_images import make_image_dataset
from lockstep.data.images.scan import IMAGE_SUFFIXES, OTHER_IMAGE_SUFFIXES, is_hidden, scan_folder
from lockstep.data.options import Fraction
from lockstep.data.request import DataRequest
from lockstep.errors import DataError

_MAX_SHOWN: Final = 5


@dataclass(frozen=True)
class Options:
    """The fraction of images for validation if there is no folder val/. Set only one option. 0 means no validation.

    - `validation`: The fraction of all images.
    - `validation_per_class`: The fraction of images in each class. Defaults to 0.1 if there is no folder train/.
    """

    validation: Fraction | None = None
    validation_per_class: Fraction | None = None


def open_data(request: DataRequest, options: Options) -> DataSet:
    """Open the images in `root/train/<class>/` and `root/val/<class>/`, with the requested crops."""
    result = scan_folder(request.root, options.validation, options.validation_per_class)
    validation = ImageFiles(result.validation) if result.validation else None
    data = make_image_dataset(ImageFiles(result.train), validation, result.classes, request)
    return replace(data, warnings=tuple(_describe_ignored_files(result.ignored)))


def _describe_ignored_files(ignored: Sequence[str]) -> Iterator[str]:
    if ignored:
        kinds = Counter(_get_file_kind(os.path.basename(file)) for file in ignored)
        top_kinds = sorted(kinds, key=lambda kind: (kind not in OTHER_IMAGE_SUFFIXES, -kinds[kind], kind))[:_MAX_SHOWN]
        remainder = len(ignored) - sum(kinds[kind] for kind in top_kinds)
        descriptions = [f"{kinds[kind]:,} {printable_line(kind)}" for kind in top_kinds] + [f"{remainder:,} other"] * (
            remainder > 0
        )
        yield (
            f"dataset folder: files ignored: {len(ignored):,} ({', '.join(descriptions)}); images must be in a class "
            f"folder, and end in {', '.join(IMAGE_SUFFIXES)}"
        )


def _get_file_kind(name: str) -> str:
    return "hidden" if is_hidden(name) else os.path.splitext(name)[1].lower() or "without a suffix"


@final
class ImageFiles:
    """An image source that reads image files. `files` contains the path and the class of each image."""

    def __init__(self, files: Sequence[tuple[str, int]]) -> None:
        # Store all paths in a single array instead of a list of strings. In forked loader processes, accessing a string
        # changes its reference count, so the memory of a million strings would be copied.
        names = [os.fsencode(file) for file, _ in files]
        self._names = np.frombuffer(b"".join(names), np.uint8)
        self._ends = np.cumsum([len(name) for name in names])
        self.targets = torch.tensor([target for _, target in files])

    def get_name(self, index: int) -> str:
        """Return the path of an image."""
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._names[start : self._ends[index]].tobytes())

    def read_bytes(self, index: int) -> bytearray:
        """See ImageSource."""
        file = self.get_name(index)
        # Raise this error even with on_error=skip, because the disk or the network may have failed.
        try:
            with plainfile.open_reader(Path(file), links=True) as stream:
                return bytearray(stream.read())
        except OSError as error:
            advice = "remove it" if error.errno == errno.EINVAL else "check the disk it is on"
            raise DataError(f"{file}: cannot be read: {error.strerror}; {advice}") from error
