"""Data sets by name, or by the import path of the user's own function; imports each source only when named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from lockstep.core.names import choices
from lockstep.data.sizes import SYNTHETIC
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.data.base import DataSet

OnError = Literal["raise", "skip"]

NAMES: Final = ("digits", "cifar10", "cifar100", "mnist", "fashion_mnist", "folder", "synthetic")
_NATIVE_SIZE: Final = {"digits": 8, "cifar10": 32, "cifar100": 32, "mnist": 28, "fashion_mnist": 28}
_FOLDER_SIZE: Final = 224
_SYNTHETIC_SIZE: Final = 32


def open_data(
    *,
    name: str,
    root: str,
    download: bool,
    image_size: int | None,
    resize_size: int | None,
    resized_crop: bool,
    resized_crop_scale: Sequence[float],
    exif: bool,
    on_error: OnError,
    options: Mapping[str, Any],
) -> DataSet:
    """Return the data set `name`. Raises UsageError where it does not exist or what is asked does not fit it.

    A source that downloads does so in one process of a node at a time; every rank may call this at once.
    """
    _check_words(
        name=name,
        image_size=image_size,
        resize_size=resize_size,
        resized_crop=resized_crop,
        resized_crop_scale=resized_crop_scale,
        exif=exif,
        on_error=on_error,
        options=options,
    )
    if ":" in name:
        from lockstep.data.imported import imported

        return imported(name, options)
    if name == "digits":
        from lockstep.data.images.digits import digits

        return digits()
    if name == "synthetic":
        return _synthetic(image_size or _SYNTHETIC_SIZE, {**SYNTHETIC, **options})
    if name == "folder":
        from lockstep.data.images.folder import folder

        size = image_size or _FOLDER_SIZE
        scale = (resized_crop_scale[0], resized_crop_scale[1]) if resized_crop else None
        return folder(root, image_size=size, resize_size=resize_size or size, scale=scale, exif=exif, on_error=on_error)
    from lockstep.data.images.torchvision_sets import torchvision_set

    return torchvision_set(name, root, download)


def _check_words(
    *,
    name: str,
    image_size: int | None,
    resize_size: int | None,
    resized_crop: bool,
    resized_crop_scale: Sequence[float],
    exif: bool,
    on_error: OnError,
    options: Mapping[str, Any],
) -> None:
    if name not in NAMES and ":" not in name:
        valid = (*NAMES, "package.module:function")
        raise UsageError(f"data set {name}: no such data set{choices(name, valid)}")
    found = [
        *_misplaced(name, image_size, resize_size, resized_crop, exif, on_error),
        *_contradictions(name, image_size or _FOLDER_SIZE, resize_size, resized_crop_scale),
        *_options(name, options),
    ]
    if found:
        raise UsageError("\n".join(f"data set {name}: {each}" for each in found))


def _misplaced(
    name: str, image_size: int | None, resize_size: int | None, resized_crop: bool, exif: bool, on_error: OnError
) -> Iterator[str]:
    """Yield what this source could only ignore."""
    native = _NATIVE_SIZE.get(name)
    if image_size not in (None, native) and name not in ("folder", "synthetic"):
        has = f"its images are {native}x{native}" if native else "its function decides the size"
        yield f"image_size: {image_size} cannot be had, {has}; remove it"
    if name == "folder":
        return
    if resize_size is not None:
        yield f"resize_size: {resize_size} is only for data set folder; remove it"
    if resized_crop:
        yield "augment.resized_crop: true is only for data set folder; remove it"
    if not exif:
        yield "exif: false is only for data set folder; remove it"
    if on_error == "skip" and ":" in name:
        yield "on_error: skip is only for data set folder; catch the error in your own data set"


def _contradictions(name: str, size: int, resize_size: int | None, scale: Sequence[float]) -> Iterator[str]:
    if name != "folder":
        return
    if resize_size is not None and resize_size < size:
        yield f"resize_size: {resize_size} is less than the image_size {size} to be cut; use at least {size}"
    if not 0 < scale[0] <= scale[1] <= 1:
        yield (
            f"augment.resized_crop_scale: {list(scale)} is no range of shares of the area; "
            f"use 0 < smallest <= largest <= 1, such as [0.08, 1.0]"
        )


def _options(name: str, options: Mapping[str, Any]) -> Iterator[str]:
    if ":" in name:
        return
    for option, value in options.items():
        if name != "synthetic":
            yield f"options.{option}: it takes no options; remove it"
        elif option not in SYNTHETIC:
            yield f"options.{option}: unknown option{choices(option, SYNTHETIC)}"
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f"options.{option}: expected a whole number of at least 1; got {value!r}"


def _synthetic(size: int, options: Mapping[str, int]) -> DataSet:
    from lockstep.data.images.synthetic import synthetic

    return synthetic(
        image_size=size,
        samples=options["samples"],
        validation_samples=options["validation_samples"],
        classes=options["classes"],
        channels=options["channels"],
    )
