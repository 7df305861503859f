"""Images in WebDataset tar archives: NAME.jpg next to NAME.cls or NAME.json.

Each archive is scanned once. The offsets of its members are cached next to it, which allows random access to samples.
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
from lockstep.data.images.pictures import pictures
from lockstep.data.images.tar_index import TarIndex, load_index
from lockstep.data.options import Count, Names, Share, Text
from lockstep.data.request import DataRequest
from lockstep.data.shares import in_share
from lockstep.errors import DataError, UsageError, os_error_as


@dataclass(frozen=True)
class Options:
    """The labels and classes of the images, and the share for validation.

    - `label`: The suffix of the member with the class, or a key in the .json of the image.
    - `classes`: The number of classes or their names. Defaults to one more than the largest class.
    - `validation`: The share of images for validation if there are no val archives; 0 means none. Required in this
      case.
    """

    label: Text = "cls"
    classes: Count | Names | None = None
    validation: Share | None = None


def open_data(request: DataRequest, options: Options) -> DataSet:
    """Return the images of the archives in `root`: train*.tar and val*.tar, or *.tar in the folders train/ and val/."""
    train = [load_index(each, options.label) for each in _archives(Path(request.root), "train")]
    held_out = [load_index(each, options.label) for each in _archives(Path(request.root), "val")]
    if not train:
        raise UsageError(
            f"dataset webdataset: found neither train*.tar nor train/*.tar in {request.root}; set recipe.data.root to "
            f"the folder of the archives"
        )
    if bool(held_out) == (options.validation is not None):
        found = (
            "not supported with val archives; remove it"
            if held_out
            else "missing, but required without val archives; set a fraction, or 0 for no validation"
        )
        raise UsageError(f"dataset webdataset: recipe.data.options.validation: {found}")
    every = Archives(train)
    parts = (every, Archives(held_out)) if held_out else every.split(options.validation or 0.0)
    classes = _classes(options.classes, [*every.targets.tolist(), *parts[1].targets.tolist()])
    if not len(parts[0].targets):
        raise UsageError(
            f"dataset webdataset: recipe.data.options.validation: {options.validation} leaves no image for training; "
            f"use a smaller fraction"
        )
    return pictures(parts[0], parts[1] if len(parts[1].targets) else None, classes, request)


@final
class Archives:
    """The images of several archives in order, or only those at `places`."""

    def __init__(self, archives: Sequence[TarIndex], places: Sequence[int] | None = None) -> None:
        self._archives = archives
        self._firsts = np.cumsum([0, *(len(each.targets) for each in archives)])
        self._places = np.arange(self._firsts[-1]) if places is None else np.array(places, np.int64)
        targets = np.concatenate([each.targets for each in archives]) if archives else np.empty(0, np.int64)
        self.targets = torch.from_numpy(targets[self._places])
        self._opened: dict[int, int] = {}  # descriptors, which forked processes can share: pread uses no position

    def name(self, index: int) -> str:
        """See Pictures."""
        archive, place = self._locate(index)
        return f"{self._archives[archive].file}: {self._archives[archive].names[place]}"

    def content(self, index: int) -> bytearray:
        """See Pictures."""
        number, place = self._locate(index)
        archive = self._archives[number]
        offset, size = archive.spans[place].tolist()
        with os_error_as(DataError, f"{archive.file}: cannot be read", "; check the disk it is on"):
            if number not in self._opened:
                self._opened[number] = plainfile.descriptor(Path(archive.file), links=True)
            content = bytearray(size)
            if os.preadv(self._opened[number], [content], offset) != size:
                raise DataError(f"{self.name(index)}: the archive was truncated while in use; copy it again")
        return content

    def split(self, share: float) -> tuple[Self, Self]:
        """Return the images without a share of them, and the share, chosen by their names."""
        chosen = [in_share(name, share) for archive in self._archives for name in archive.names.tolist()]
        train, validation = ([n for n, each in enumerate(chosen) if each is wanted] for wanted in (False, True))
        return Archives(self._archives, train), Archives(self._archives, validation)

    def _locate(self, index: int) -> tuple[int, int]:
        place = int(self._places[index])
        archive = int(np.searchsorted(self._firsts, place, side="right")) - 1
        return archive, place - int(self._firsts[archive])


def _archives(root: Path, part: str) -> list[Path]:
    return [*sorted(root.glob(f"{part}*.tar")), *sorted((root / part).glob("*.tar"))]


def _classes(given: int | list[str] | None, targets: list[int]) -> list[str]:
    names = given if isinstance(given, list) else [str(each) for each in range(given or max(targets, default=0) + 1)]
    if targets and (min(targets) < 0 or max(targets) >= len(names)):
        raise UsageError(
            f"dataset webdataset: recipe.data.options.classes: {len(names)} classes, but the images have classes "
            f"{min(targets)} to {max(targets)}; set at least {max(targets) + 1} classes"
        )
    return names
