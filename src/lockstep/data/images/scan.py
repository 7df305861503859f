"""The images of a folder of classes, found by their names and without torch, and what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lockstep.common.patterns import list_some
from lockstep.data.shares import in_share
from lockstep.errors import UsageError

IMAGE_SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})
_SHOWN: Final = 5
_OR_NO_SPLIT: Final = "; or <class>/ alone with options.validation=0.1, the share that is kept for validation"
_OR_A_SHARE: Final = "; or keep a share of train/ for validation with options.validation=0.1, or none with 0"


@dataclass(frozen=True, slots=True)
class Scan:
    """Classes in the order of their numbers; for each split, its files in order and the class of each."""

    classes: list[str]
    train: list[tuple[str, int]]
    validation: list[tuple[str, int]]


def scan(root: str, share: float | None = None) -> Scan:
    """Find `root/train/<class>/*` and `root/val/<class>/*`, at any depth below a class.

    Where a `share` is given there must be no val/: that much of train/, or without one of `root/<class>/*`, is
    validation's, by a hash of each file's path below it. Names are sorted by their code points, so that every machine
    sees one order. Hidden files and folders, and files that are not named as images, are passed over. Raises UsageError
    for all that is wrong, a line each.
    """
    if share is not None:
        return _split_by_share(root, share)
    splits = {"train": _classes(root, "train"), "val": _classes(root, "val")}
    _refuse([*_different(root, splits), *_empty(root, splits)])
    classes = sorted(splits["train"])
    return Scan(classes, _label_files(splits["train"], classes), _label_files(splits["val"], classes))


def _split_by_share(root: str, share: float) -> Scan:
    if (Path(root) / "val").is_dir():
        raise UsageError(f"data set folder: there is a folder {Path(root) / 'val'}; remove options.validation")
    split = "train" if (Path(root) / "train").is_dir() else ""
    found = _classes(root, split)
    _refuse(list(_empty(root, {split: found})))
    classes = sorted(found)
    above = os.path.join(root, split, "")
    train: list[tuple[str, int]] = []
    validation: list[tuple[str, int]] = []
    for file, number in _label_files(found, classes):
        part = validation if in_share(file.removeprefix(above), share) else train
        part.append((file, number))
    if len({number for _, number in train}) < len(classes) or (share and not validation):
        raise UsageError(
            f"data set folder: options.validation: {share} of the {len(train) + len(validation):,} images below "
            f"{Path(root) / split} leaves a class, or validation, without any; use another share, or a folder val"
        )
    return Scan(classes, train, validation)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UsageError("\n".join(f"data set folder: {each}" for each in problems))


def _classes(root: str, split: str) -> dict[str, list[str]]:
    folder = Path(root) / split
    if not folder.is_dir():
        raise UsageError(
            f"data set folder: there is no folder {folder}; recipe.data.root must hold train/<class>/ and "
            f"val/<class>/ with the images of each class{_OR_A_SHARE if split == 'val' else _OR_NO_SPLIT}"
        )
    with os.scandir(folder) as entries:
        names = sorted(each.name for each in entries if each.is_dir() and not is_hidden(each.name))
    if not names:
        raise UsageError(f"data set folder: {folder} holds no folders of classes; put each class's images in one")
    found = {name: list(images(str(folder / name))) for name in names}
    if not any(found.values()):
        raise UsageError(
            f"data set folder: no images in the {len(names)} folders of {folder}; "
            f"images end in {', '.join(sorted(IMAGE_SUFFIXES))}"
        )
    return found


def _different(root: str, splits: dict[str, dict[str, list[str]]]) -> Iterator[str]:
    for here, there in (("train", "val"), ("val", "train")):
        if missing := sorted(splits[here].keys() - splits[there].keys()):
            yield (
                f"{_format_classes(missing)} of {Path(root) / here} "
                f"{'is' if len(missing) == 1 else 'are'} missing in {Path(root) / there}; both need the same"
            )


def _empty(root: str, splits: dict[str, dict[str, list[str]]]) -> Iterator[str]:
    for split, found in splits.items():
        if empty := [name for name, files in found.items() if not files]:
            yield f"no images in {_format_classes(empty)} of {Path(root) / split}; add some, or remove the folder"


def _format_classes(names: list[str]) -> str:
    shown = list_some([f"'{each}'" for each in names], _SHOWN)
    return f"{'class' if len(names) == 1 else f'{len(names)} classes:'} {shown}"


def _label_files(found: dict[str, list[str]], classes: list[str]) -> list[tuple[str, int]]:
    return [(file, number) for number, name in enumerate(classes) for file in found[name]]


def images(folder: str) -> Iterator[str]:
    """Yield the images below `folder` in order, by their names alone; passes over what is hidden.

    Links to folders are followed, but into no folder twice, and into none that contains `folder` itself: a link that
    leads back would give the same images again and again.
    """
    if not os.path.isdir(folder):
        return
    above = (*Path(os.path.abspath(folder)).parents, *Path(os.path.realpath(folder)).parents)
    seen = {_identity(each) for each in above}
    if not _is_new(folder, seen):
        return
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [sub for sub in sorted(folders) if not is_hidden(sub) and _is_new(f"{parent}{os.sep}{sub}", seen)]
        for file in sorted(files):
            if os.path.splitext(file)[1].lower() in IMAGE_SUFFIXES and not is_hidden(file):
                yield f"{parent}{os.sep}{file}"


def is_hidden(name: str) -> bool:
    """Say whether a file or folder is one that users do not see: `._1.jpg` is no image."""
    return name.startswith(".")


def count_images(folder: Path) -> int:
    """Count the images below the folders of the classes."""
    return sum(os.path.dirname(file) != str(folder) for file in images(str(folder)))


def _is_new(folder: str, seen: set[tuple[int, int]]) -> bool:
    """Say whether a folder was not seen before, and note it."""
    identity = _identity(folder)
    is_new = identity not in seen
    seen.add(identity)
    return is_new


def _identity(folder: str | Path) -> tuple[int, int]:
    found = os.stat(folder)
    return found.st_dev, found.st_ino
