"""Finds the images of a folder of classes by their names, and the errors in its layout. Doesn't import torch."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lockstep.common.patterns import list_some
from lockstep.data.shares import in_share, take_share
from lockstep.errors import UsageError

IMAGE_SUFFIXES: Final = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# Used for prediction if Pillow can read them, but never part of a dataset, as in torchvision's ImageFolder: adding a
# suffix would change the samples of existing datasets.
OTHER_PICTURES: Final = (".gif", ".avif", ".heic", ".heif", ".ico", ".jfif", ".jp2", ".jxl", ".tga")
VALIDATION_PER_CLASS: Final = 0.1  # the default if the root contains the folders of the classes
_SHOWN: Final = 5
_LIKE_A_SPLIT: Final = frozenset({"train", "training", "test", "testing", "val", "valid", "validation", "dev"})
_OR_NO_SPLIT: Final = ", or in only <class>/, which is then split into training and validation"
_OR_A_SHARE: Final = (
    ", or set recipe.data.options.validation_per_class=0.1 to use a fraction of train/ for validation (0 for no "
    "validation)"
)


@dataclass(frozen=True, slots=True)
class Scan:
    """The classes in the order of their indices, and for each split its files in order, each with its class.

    `ignored` are the files in the same folders that don't have the name of an image, or aren't in the folder of a
    class.
    """

    classes: list[str]
    train: list[tuple[str, int]]
    validation: list[tuple[str, int]]
    ignored: list[str]


@dataclass(frozen=True, slots=True)
class _Found:
    """The images of each class of a split, and all other files in its folder."""

    images: dict[str, list[str]]
    ignored: list[str]


def scan(root: str, share: float | None = None, per_class: float | None = None) -> Scan:
    """Find `root/train/<class>/*` and `root/val/<class>/*`, at any depth below a class.

    - Without val/, validation gets `share` of all images of train/, or `per_class` of the images of each class. You
      must set one of the two.
    - If there is no train/ either, the images of `root/<class>/*` are split in the same way. In this case, `per_class`
      defaults to VALIDATION_PER_CLASS.

    The choice is a function of a hash of each file's path below that folder. Names are sorted by their code points, so
    the order is the same on every machine. Hidden folders are ignored. Raises UsageError with one line per problem.
    """
    if share is not None and per_class is not None:
        raise UsageError(
            "dataset folder: recipe.data.options: validation and validation_per_class are both set; set only one of "
            "them"
        )
    if share is not None:
        return _split(root, share)
    if per_class is not None:
        return _split_classes(root, per_class)
    if os.path.isdir(root) and not any(os.path.isdir(os.path.join(root, split)) for split in ("train", "val")):
        return _split_classes(root, None)
    splits = {"train": _look_into(root, "train"), "val": _look_into(root, "val")}
    images = {split: found.images for split, found in splits.items()}
    _refuse([*_different(root, images), *_empty(root, images)])
    classes = sorted(images["train"])
    ignored = [file for found in splits.values() for file in found.ignored]
    return Scan(classes, _label_files(images["train"], classes), _label_files(images["val"], classes), ignored)


def _split(root: str, share: float) -> Scan:
    """Split the images by their hashes, so that adding images doesn't move any other image."""
    folder, found = _only_split(root, "validation")
    above = os.path.join(root, folder.name if folder != Path(root) else "", "")  # root as the user wrote it
    classes = sorted(found.images)
    train: list[tuple[str, int]] = []
    validation: list[tuple[str, int]] = []
    for file, number in _label_files(found.images, classes):
        part = validation if in_share(file.removeprefix(above), share) else train
        part.append((file, number))
    if len({number for _, number in train}) < len(classes) or (share and not validation):
        raise UsageError(
            f"dataset folder: recipe.data.options.validation: {share} of the {len(train) + len(validation):,} images "
            f"below {folder} leaves a class or the validation part without images; use a different fraction, or set "
            f"recipe.data.options.validation_per_class instead"
        )
    return Scan(classes, train, validation, found.ignored)


def _split_classes(root: str, share: float | None) -> Scan:
    """Take the share of each class. None means VALIDATION_PER_CLASS, if the folders in the root look like classes."""
    folder, found = _only_split(root, "validation_per_class")
    if share is None:
        share = VALIDATION_PER_CLASS
        _check_layout(folder, found.images)
    above = f"{folder}{os.sep}"
    classes = sorted(found.images)
    taken: set[str] = set()
    for files in found.images.values():
        taken |= {above + name for name in take_share([file.removeprefix(above) for file in files], share)}
    if share and not taken:
        raise UsageError(
            f"dataset folder: each class of {folder} has a single image, so no image is left for validation; add "
            f"images, or set recipe.data.options.validation_per_class=0"
        )
    labelled = _label_files(found.images, classes)
    train, validation = ([each for each in labelled if (each[0] in taken) == part] for part in (False, True))
    return Scan(classes, train, validation, found.ignored)


def _only_split(root: str, option: str) -> tuple[Path, _Found]:
    """Return the folder of the classes, which is train/ or the root, and its files.

    Raises UsageError if there is a val/.
    """
    if (Path(root) / "val").is_dir():
        raise UsageError(
            f"dataset folder: recipe.data.options.{option}: not supported with the folder {Path(root) / 'val'}; remove "
            f"the option"
        )
    split = "train" if (Path(root) / "train").is_dir() else ""
    found = _look_into(root, split)
    _refuse(list(_empty(root, {split: found.images})))
    return Path(root) / split, found


def _check_layout(root: Path, found: dict[str, list[str]]) -> None:
    """Raise UsageError if the folders in the root don't look like classes."""
    if len(found) == 1:
        raise UsageError(
            f"dataset folder: {root} contains a single folder, '{next(iter(found))}', but at least 2 classes are "
            f"required; set recipe.data.root to the folder that contains the class folders"
        )
    deep = {name for name, files in found.items() if all(root / name != Path(file).parent for file in files)}
    if splits := sorted(name for name in deep if name.lower() in _LIKE_A_SPLIT):
        raise UsageError(
            f"dataset folder: {root / splits[0]} contains folders and has the name of a split; rename the splits to "
            f"train and val, or set recipe.data.options.validation_per_class={VALIDATION_PER_CLASS} if it is a class"
        )


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UsageError("\n".join(f"dataset folder: {each}" for each in problems))


def _look_into(root: str, split: str) -> _Found:
    folder = Path(root) / split
    if not folder.is_dir():
        lacking = folder if os.path.isdir(root) else Path(root)
        what = "not a folder" if lacking.exists() else "no such folder"
        raise UsageError(
            f"dataset folder: {lacking}: {what}; set recipe.data.root to a folder with the images of each class in "
            f"train/<class>/ and val/<class>/{_OR_A_SHARE if split == 'val' else _OR_NO_SPLIT}"
        )
    with os.scandir(folder) as entries:
        listed = [(each.name, each.is_dir()) for each in entries]
    names = sorted(name for name, is_folder in listed if is_folder and not is_hidden(name))
    if not names:
        raise UsageError(
            f"dataset folder: {folder} contains no class folders; put the images of each class into its own folder"
        )
    found: dict[str, list[str]] = {name: [] for name in names}
    ignored = sorted(str(folder / name) for name, is_folder in listed if not is_folder)
    for name in names:
        for file in _files(str(folder / name)):
            (found[name] if _is_image(file, IMAGE_SUFFIXES) else ignored).append(file)
    if not any(found.values()):
        raise UsageError(
            f"dataset folder: no images in the {len(names)} class folders of {folder}; add files that end in "
            f"{', '.join(IMAGE_SUFFIXES)}"
        )
    return _Found(found, ignored)


def _different(root: str, splits: dict[str, dict[str, list[str]]]) -> Iterator[str]:
    for here, there in (("train", "val"), ("val", "train")):
        if missing := sorted(splits[here].keys() - splits[there].keys()):
            yield (
                f"{_format_classes(missing)} of {Path(root) / here} "
                f"{'is' if len(missing) == 1 else 'are'} missing in {Path(root) / there}; use the same classes in both"
            )


def _empty(root: str, splits: dict[str, dict[str, list[str]]]) -> Iterator[str]:
    for split, found in splits.items():
        if empty := [name for name, files in found.items() if not files]:
            where = f"{_format_classes(empty)} of {Path(root) / split}"
            yield f"no images in {where}; add files that end in {', '.join(IMAGE_SUFFIXES)}, or remove the folder"


def _format_classes(names: list[str]) -> str:
    shown = list_some([f"'{each}'" for each in names], _SHOWN)
    return f"{'class' if len(names) == 1 else f'{len(names)} classes:'} {shown}"


def _label_files(found: dict[str, list[str]], classes: list[str]) -> list[tuple[str, int]]:
    return [(file, number) for number, name in enumerate(classes) for file in found[name]]


def pictures_below(folder: str) -> Iterator[str]:
    """Yield the files below `folder` with the name of an image, in order. Ignores hidden files and folders."""
    return (file for file in _files(folder) if _is_image(file, IMAGE_SUFFIXES + OTHER_PICTURES))


def _is_image(file: str, suffixes: tuple[str, ...]) -> bool:
    return file.lower().endswith(suffixes) and not is_hidden(os.path.basename(file))


def _files(folder: str) -> Iterator[str]:
    """Yield the files below `folder` in order, except for files in hidden folders.

    Follows links to folders, but enters each folder only once, and never a folder that contains `folder` itself.
    Otherwise, a link to a parent folder would yield the same images again and again.
    """
    if not os.path.isdir(folder):
        return
    above = (*Path(os.path.abspath(folder)).parents, *Path(os.path.realpath(folder)).parents)
    seen = {_identity(each) for each in above}
    if not _is_new(folder, seen):
        return
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [sub for sub in sorted(folders) if not is_hidden(sub) and _is_new(f"{parent}{os.sep}{sub}", seen)]
        yield from (f"{parent}{os.sep}{file}" for file in sorted(files))


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden from users, such as `._1.jpg` and the __MACOSX of a Mac's zip file."""
    return name.startswith(".") or name == "__MACOSX"


def _is_new(folder: str, seen: set[tuple[int, int]]) -> bool:
    """Return whether a folder hasn't been seen before, and record it as seen."""
    identity = _identity(folder)
    is_new = identity not in seen
    seen.add(identity)
    return is_new


def _identity(folder: str | Path) -> tuple[int, int]:
    found = os.stat(folder)
    return found.st_dev, found.st_ino
