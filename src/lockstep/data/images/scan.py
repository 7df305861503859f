"""Finds the image files in class folders, and checks the folder layout. This module doesn't import torch."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lockstep.common.patterns import list_some
from lockstep.data.validation_split import HELD_OUT_NAMES, TRAIN_NAMES, is_held_out, select_held_out
from lockstep.errors import UsageError

IMAGE_SUFFIXES: Final = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# Files with these suffixes are only used for prediction. Datasets ignore them, as torchvision's ImageFolder does.
# Otherwise, existing datasets would get additional samples.
OTHER_IMAGE_SUFFIXES: Final = (".gif", ".avif", ".heic", ".heif", ".ico", ".jfif", ".jp2", ".jxl", ".tga")
VALIDATION_PER_CLASS: Final = 0.1  # default validation fraction if the root directly contains the class folders
_MAX_SHOWN: Final = 5
_CLASSES_ADVICE: Final = ", or in only <class>/, which is then split into training and validation"
_FRACTION_ADVICE: Final = (
    ", or set recipe.data.options.validation_per_class=0.1 to use a fraction of train/ for validation (0 for no "
    "validation)"
)


@dataclass(frozen=True, slots=True)
class ScanResult:
    """The class names in the order of their indices, and the (path, class index) pairs of each split.

    `ignored` contains files that don't have an image suffix, or aren't in a class folder.
    """

    classes: list[str]
    train: list[tuple[str, int]]
    validation: list[tuple[str, int]]
    ignored: list[str]


@dataclass(frozen=True, slots=True)
class _Listing:
    """The image files in a split's folder, grouped by class, and the ignored files in this folder."""

    images: dict[str, list[str]]
    ignored: list[str]


def scan_folder(root: str, fraction: float | None = None, fraction_per_class: float | None = None) -> ScanResult:
    """Find the images in `root/train/<class>/` and `root/val/<class>/`, at any depth under a class folder.

    - If there is no folder val/, the images in train/ are split into training and validation. In this case, you must
      set either `fraction`, the validation fraction of all images, or `fraction_per_class`, the validation fraction of
      each class.
    - If there is no folder train/ either, the images in `root/<class>/` are split in the same way. In this case,
      `fraction_per_class` defaults to VALIDATION_PER_CLASS.

    Images are assigned to a split by a hash of their relative path. Names are sorted by code points, so the order is
    the same on every machine. Hidden folders are ignored. Raises UsageError with a line for each problem.
    """
    if fraction is not None and fraction_per_class is not None:
        raise UsageError(
            "dataset folder: recipe.data.options: validation and validation_per_class are both set; set only one of "
            "them"
        )
    if fraction is not None:
        return _split_images(root, fraction)
    if fraction_per_class is not None:
        return _split_classes(root, fraction_per_class)
    if os.path.isdir(root) and not any(os.path.isdir(os.path.join(root, split)) for split in ("train", "val")):
        return _split_classes(root, None)
    splits = {"train": _list_split(root, "train"), "val": _list_split(root, "val")}
    images = {split: listing.images for split, listing in splits.items()}
    _raise_on_problems([*_find_class_mismatches(root, images), *_find_empty_classes(root, images)])
    classes = sorted(images["train"])
    ignored = [file for listing in splits.values() for file in listing.ignored]
    return ScanResult(classes, _label_files(images["train"], classes), _label_files(images["val"], classes), ignored)


def _split_images(root: str, fraction: float) -> ScanResult:
    """Split all images by the hash of their path. An image stays in its split if other images are added later."""
    folder, listing = _list_single_split(root, "validation")
    prefix = os.path.join(root, folder.name if folder != Path(root) else "", "")  # root as the user wrote it
    classes = sorted(listing.images)
    train: list[tuple[str, int]] = []
    validation: list[tuple[str, int]] = []
    for file, number in _label_files(listing.images, classes):
        split = validation if is_held_out(file.removeprefix(prefix), fraction) else train
        split.append((file, number))
    if len({number for _, number in train}) < len(classes) or (fraction and not validation):
        raise UsageError(
            f"dataset folder: recipe.data.options.validation: {fraction} of the {len(train) + len(validation):,} "
            f"images in {folder} leaves a class or the validation split without images; use a different fraction, or "
            "set recipe.data.options.validation_per_class instead"
        )
    return ScanResult(classes, train, validation, listing.ignored)


def _split_classes(root: str, fraction: float | None) -> ScanResult:
    """Split the images of each class. If `fraction` is None, check the layout, and use the default fraction."""
    folder, listing = _list_single_split(root, "validation_per_class")
    if fraction is None:
        fraction = VALIDATION_PER_CLASS
        _check_layout(folder, listing.images)
    prefix = f"{folder}{os.sep}"
    classes = sorted(listing.images)
    held_out: set[str] = set()
    for files in listing.images.values():
        held_out |= {prefix + name for name in select_held_out([file.removeprefix(prefix) for file in files], fraction)}
    if fraction and not held_out:
        raise UsageError(
            f"dataset folder: each class in {folder} has a single image, so no image is left for validation; add "
            f"images, or set recipe.data.options.validation_per_class=0"
        )
    entries = _label_files(listing.images, classes)
    train, validation = (
        [entry for entry in entries if (entry[0] in held_out) == is_validation] for is_validation in (False, True)
    )
    return ScanResult(classes, train, validation, listing.ignored)


def _list_single_split(root: str, option: str) -> tuple[Path, _Listing]:
    """List the images of a dataset without a folder val/. Return their folder (train/ or the root) and the listing.

    Raises UsageError if there is a folder val/, because `option` is only supported without it.
    """
    if (Path(root) / "val").is_dir():
        raise UsageError(
            f"dataset folder: recipe.data.options.{option}: not supported with the folder {Path(root) / 'val'}; remove "
            f"the option"
        )
    split = "train" if (Path(root) / "train").is_dir() else ""
    listing = _list_split(root, split)
    _raise_on_problems(list(_find_empty_classes(root, {split: listing.images})))
    return Path(root) / split, listing


def _check_layout(root: Path, images: dict[str, list[str]]) -> None:
    """Raise UsageError if the root doesn't seem to contain class folders."""
    if len(images) == 1:
        raise UsageError(
            f"dataset folder: {root} contains a single folder, '{next(iter(images))}', but at least 2 classes are "
            f"required; set recipe.data.root to the folder that contains the class folders"
        )
    nested = {name for name, files in images.items() if all(root / name != Path(file).parent for file in files)}
    if splits := sorted(name for name in nested if name.lower() in (*TRAIN_NAMES, *HELD_OUT_NAMES)):
        raise UsageError(
            f"dataset folder: {root / splits[0]} contains folders and has the name of a split; rename the splits to "
            f"train and val, or set recipe.data.options.validation_per_class={VALIDATION_PER_CLASS} if it is a class"
        )


def _raise_on_problems(problems: list[str]) -> None:
    if problems:
        raise UsageError("\n".join(f"dataset folder: {problem}" for problem in problems))


def _list_split(root: str, split_name: str) -> _Listing:
    folder = Path(root) / split_name
    if not folder.is_dir():
        missing = folder if os.path.isdir(root) else Path(root)
        problem = "not a folder" if missing.exists() else "no such folder"
        raise UsageError(
            f"dataset folder: {missing}: {problem}; set recipe.data.root to a folder with the images of each class in "
            f"train/<class>/ and val/<class>/{_FRACTION_ADVICE if split_name == 'val' else _CLASSES_ADVICE}"
        )
    with os.scandir(folder) as entries:
        children = [(entry.name, entry.is_dir()) for entry in entries]
    names = sorted(name for name, is_folder in children if is_folder and not is_hidden(name))
    if not names:
        raise UsageError(
            f"dataset folder: {folder} contains no class folders; put the images of each class into its own folder"
        )
    images: dict[str, list[str]] = {name: [] for name in names}
    ignored = sorted(str(folder / name) for name, is_folder in children if not is_folder)
    for name in names:
        for file in _walk_files(str(folder / name)):
            (images[name] if _is_image(file, IMAGE_SUFFIXES) else ignored).append(file)
    if not any(images.values()):
        raise UsageError(
            f"dataset folder: no images in the {len(names)} class folders of {folder}; add files that end in "
            f"{', '.join(IMAGE_SUFFIXES)}"
        )
    return _Listing(images, ignored)


def _find_class_mismatches(root: str, files_by_split: dict[str, dict[str, list[str]]]) -> Iterator[str]:
    for split, other_split in (("train", "val"), ("val", "train")):
        if names := sorted(files_by_split[split].keys() - files_by_split[other_split].keys()):
            yield (
                f"{_format_classes(names)} of {Path(root) / split} {'is' if len(names) == 1 else 'are'} missing in "
                f"{Path(root) / other_split}; use the same classes in both"
            )


def _find_empty_classes(root: str, files_by_split: dict[str, dict[str, list[str]]]) -> Iterator[str]:
    for split, images in files_by_split.items():
        if names := [name for name, files in images.items() if not files]:
            location = f"{_format_classes(names)} of {Path(root) / split}"
            yield f"no images in {location}; add files that end in {', '.join(IMAGE_SUFFIXES)}, or remove the folder"


def _format_classes(names: list[str]) -> str:
    listing = list_some([f"'{name}'" for name in names], _MAX_SHOWN)
    return f"{'class' if len(names) == 1 else f'{len(names)} classes:'} {listing}"


def _label_files(files_by_class: dict[str, list[str]], class_names: list[str]) -> list[tuple[str, int]]:
    return [(file, number) for number, name in enumerate(class_names) for file in files_by_class[name]]


def iterate_images(folder: str) -> Iterator[str]:
    """Yield the image files under `folder`, sorted by name. Hidden files and folders are ignored."""
    return (file for file in _walk_files(folder) if _is_image(file, IMAGE_SUFFIXES + OTHER_IMAGE_SUFFIXES))


def _is_image(file_name: str, suffixes: tuple[str, ...]) -> bool:
    return file_name.lower().endswith(suffixes) and not is_hidden(os.path.basename(file_name))


def _walk_files(folder: str) -> Iterator[str]:
    """Yield the files under `folder`, sorted by name, except for files in hidden folders.

    Symbolic links to folders are followed. Each folder is visited only once, and parents of `folder` are never visited,
    because a link to a parent folder would yield the same images again.
    """
    if not os.path.isdir(folder):
        return
    ancestors = (*Path(os.path.abspath(folder)).parents, *Path(os.path.realpath(folder)).parents)
    visited = {_get_file_id(ancestor) for ancestor in ancestors}
    if not _is_first_visit(folder, visited):
        return
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [
            sub for sub in sorted(folders) if not is_hidden(sub) and _is_first_visit(f"{parent}{os.sep}{sub}", visited)
        ]
        yield from (f"{parent}{os.sep}{file}" for file in sorted(files))


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden, such as `._1.jpg`, or `__MACOSX` from a zip file created on a Mac."""
    return name.startswith(".") or name == "__MACOSX"


def _is_first_visit(folder: str, visited_ids: set[tuple[int, int]]) -> bool:
    """Return whether a folder hasn't been visited yet, and mark it as visited."""
    identity = _get_file_id(folder)
    is_new = identity not in visited_ids
    visited_ids.add(identity)
    return is_new


def _get_file_id(folder: str | Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino
