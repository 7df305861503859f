"""Datasets of images in WebDataset tar archives. Each image NAME.jpg has a label in NAME.cls or NAME.json.

Each archive is scanned only once. To allow random access, the offsets of its members are cached next to the archive.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

import numpy as np
import torch

from lockstep.common import plainfile
from lockstep.data.base import DataSet
from lockstep.data.images.lazy_images import make_image_dataset
from lockstep.data.images.tar_index import TarIndex, load_index
from lockstep.data.options import Count, Fraction, Names, Text
from lockstep.data.request import DataRequest
from lockstep.data.streams.index import FileState, check_unchanged
from lockstep.data.validation_split import is_held_out
from lockstep.errors import DataError, UsageError, convert_os_error


@dataclass(frozen=True)
class Options:
    """The labels and classes of the images, and the validation fraction.

    - `label`: The suffix of the file that contains the class index, or a key in the .json file.
    - `classes`: The number of classes or their names. Defaults to the largest class index plus one.
    - `validation`: The fraction of images for validation, which is required if there are no val archives. 0 means no
      validation.
    """

    label: Text = "cls"
    classes: Count | Names | None = None
    validation: Fraction | None = None


def open_data(request: DataRequest, options: Options) -> DataSet:
    """Open the archives in `root`: train*.tar and val*.tar, or *.tar in the folders train/ and val/."""
    train = [load_index(path, options.label) for path in _find_archives(Path(request.root), "train")]
    held_out = [load_index(path, options.label) for path in _find_archives(Path(request.root), "val")]
    if not train:
        raise UsageError(
            f"dataset webdataset: found neither train*.tar nor train/*.tar in {request.root}; set recipe.data.root to "
            f"the folder of the archives"
        )
    if bool(held_out) == (options.validation is not None):
        problem = (
            "not supported with val archives; remove it"
            if held_out
            else "missing, but required without val archives; set a fraction, or 0 for no validation"
        )
        raise UsageError(f"dataset webdataset: recipe.data.options.validation: {problem}")
    archives = Archives(train)
    splits = (archives, Archives(held_out)) if held_out else archives.split_by_name(options.validation or 0.0)
    classes = _make_class_names(options.classes, [*archives.targets.tolist(), *splits[1].targets.tolist()])
    if not len(splits[0].targets):
        raise UsageError(
            f"dataset webdataset: recipe.data.options.validation: {options.validation} leaves no image for training; "
            f"use a smaller fraction"
        )
    return make_image_dataset(splits[0], splits[1] if len(splits[1].targets) else None, classes, request)


@final
class Archives:
    """An image source that concatenates several archives. `positions` selects images, and defaults to all images."""

    def __init__(self, archives: Sequence[TarIndex], positions: Sequence[int] | None = None) -> None:
        self._archives = archives
        self._firsts = np.cumsum([0, *(len(archive.targets) for archive in archives)])
        self._positions = np.arange(self._firsts[-1]) if positions is None else np.array(positions, np.int64)
        targets = np.concatenate([archive.targets for archive in archives]) if archives else np.empty(0, np.int64)
        self.targets = torch.from_numpy(targets[self._positions])
        # File descriptors by archive index. Forked processes can share them, because pread ignores the file position.
        self._descriptors: dict[int, int] = {}

    def get_name(self, index: int) -> str:
        """See ImageSource."""
        archive, position = self._locate(index)
        return f"{self._archives[archive].file}: {self._archives[archive].names[position]}"

    def read_bytes(self, index: int) -> bytearray:
        """See ImageSource."""
        number, position = self._locate(index)
        archive = self._archives[number]
        offset, size = archive.spans[position].tolist()
        with convert_os_error(DataError, f"{archive.file}: cannot be read", "; check the disk it is on"):
            if number not in self._descriptors:
                self._descriptors[number] = plainfile.open_descriptor(Path(archive.file), links=True)
            status = os.fstat(self._descriptors[number])
            check_unchanged(archive.file_state, FileState(archive.file, status.st_size, str(status.st_mtime_ns)))
            content = bytearray(size)
            if os.preadv(self._descriptors[number], [content], offset) != size:
                raise DataError(f"{self.get_name(index)}: the archive was truncated while in use; copy it again")
        return content

    def split_by_name(self, validation_fraction: float) -> tuple[Self, Self]:
        """Split the images into training and validation images by a hash of their names."""
        flags = [
            is_held_out(name, validation_fraction) for archive in self._archives for name in archive.names.tolist()
        ]
        train, validation = ([n for n, flag in enumerate(flags) if flag is value] for value in (False, True))
        return Archives(self._archives, train), Archives(self._archives, validation)

    def _locate(self, index: int) -> tuple[int, int]:
        position = int(self._positions[index])
        archive = int(np.searchsorted(self._firsts, position, side="right")) - 1
        return archive, position - int(self._firsts[archive])


def _find_archives(root: Path, split_name: str) -> list[Path]:
    return [*sorted(root.glob(f"{split_name}*.tar")), *sorted((root / split_name).glob("*.tar"))]


def _make_class_names(classes: int | list[str] | None, targets: list[int]) -> list[str]:
    names = (
        classes
        if isinstance(classes, list)
        else [str(number) for number in range(classes or max(targets, default=0) + 1)]
    )
    if targets and (min(targets) < 0 or max(targets) >= len(names)):
        raise UsageError(
            f"dataset webdataset: recipe.data.options.classes: {len(names)} classes, but the images have classes "
            f"{min(targets)} to {max(targets)}; set at least {max(targets) + 1} classes"
        )
    return names
