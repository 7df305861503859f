"""Inference on new images, which are decoded, cropped or resized, and normalized as in an evaluation of the run."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
from PIL import Image
from torch import Tensor

from lockstep.common import plainfile
from lockstep.config.base import values
from lockstep.data.images.decoding import UndecodableError, decode
from lockstep.data.images.device_transforms import device_transforms
from lockstep.data.images.pictures import CropSettings, as_sample, part
from lockstep.data.images.scan import IMAGE_SUFFIXES, pictures_below
from lockstep.errors import UsageError, error_as, os_error_as
from lockstep.inference.saved import Computing, SavedModel
from lockstep.tasks.batches import predictions

_CHANNEL_COUNTS: Final = (1, 3)  # supported numbers of channels
_MAX_MASK_CLASSES: Final = 256  # maximum number of classes in a mask, since a pixel is a byte

Row = dict[str, Any]  # JSON-compatible


class TopClasses(NamedTuple):
    """The most likely classes and their probabilities, with the most likely class first."""

    numbers: list[int]
    probabilities: list[float]


class LoadedImage(NamedTuple):
    """An image file, its sample, and the original height and width of the image."""

    file: Path
    sample: Tensor
    size: tuple[int, int]


@final
@dataclass(frozen=True)
class ImagePreprocessing:
    """Converts image files to samples of `shape` [channels, height, width].

    `cut` specifies how images are cropped. If `cut` is None, the full image is resized. `exif` is whether to apply
    the EXIF orientation.
    """

    shape: tuple[int, int, int]
    cut: CropSettings | None
    exif: bool

    def sample(self, file: Path) -> tuple[Tensor, tuple[int, int]]:
        """Return the sample, a uint8 tensor of `shape`, and the original height and width of the image.

        Raises UsageError if the file can't be read.
        """
        read_errors = os_error_as(UsageError, f"{file}: cannot be read", "; pass an image, or a folder of images")
        with read_errors, plainfile.reader(file, links=True) as stream:
            content = bytearray(stream.read())
        with error_as(UsageError, UndecodableError, f"{file}: cannot be read as an image", "; convert or remove it"):
            pixels = decode(content, self.exif)
        size = (pixels.shape[1], pixels.shape[2])
        return as_sample(part(pixels, self.cut) if self.cut else pixels, *self.shape), size


def preprocessing_of(saved: SavedModel) -> ImagePreprocessing:
    """Return the preprocessing that an evaluation of this run uses.

    Raises UsageError if Lockstep can't preprocess images for this run.
    """
    facts, data = saved.facts, saved.recipe.data
    shape = tuple(facts.shape or ())
    if len(shape) != 3 or shape[0] not in _CHANNEL_COUNTS:
        description = f"shape {list(shape)}" if shape else "no single shape"
        raise UsageError(
            f"{saved.path}: samples of dataset {data.name} have {description}, but images have 1 or 3 channels, height "
            f"and width; predict supports images, tables (.csv, .parquet) and prompts; for other inputs, use "
            f"lockstep.load"
        )
    if device_transforms(values(saved.recipe), saved.known) is None:
        raise UsageError(
            f"{saved.path}: dataset {data.name} returns images as floats, so predict does not know how to convert new "
            f"images; return uint8 images, which Lockstep normalizes with recipe.data.mean and recipe.data.std"
        )
    return ImagePreprocessing((shape[0], shape[1], shape[2]), saved.cut, data.exif)


def files_of(inputs: Sequence[str]) -> list[Path]:
    """Return the image files among `inputs`. Folders are searched recursively, and their files are sorted by name.

    Raises UsageError if a file doesn't exist or a folder contains no images.
    """
    files: list[Path] = []
    for name in inputs:
        folder_files = [Path(path) for path in pictures_below(name)] if os.path.isdir(name) else [Path(name)]
        if not folder_files:
            raise UsageError(f"{name}: contains no images; their names must end in {', '.join(IMAGE_SUFFIXES)}")
        files += folder_files
    missing_file = next((file for file in files if not file.exists()), None)
    if missing_file is not None:
        raise UsageError(f"{missing_file}: not found; pass images, or folders of images")
    return files


def classify(saved: SavedModel, computing: Computing, inputs: Sequence[str], top: int) -> Iterator[Row]:
    """Yield the `top` most likely classes of each image, with the most likely class first."""
    names = saved.facts.classes or []

    def row(outputs: Tensor, image: LoadedImage) -> Row:
        result = top_classes(outputs, min(top, len(names)))
        pairs = zip(result.numbers, result.probabilities, strict=True)
        return {"classes": [{"class": names[number], "probability": p} for number, p in pairs]}

    return _rows(saved, computing, inputs, row)


def regress(saved: SavedModel, computing: Computing, inputs: Sequence[str]) -> Iterator[Row]:
    """Yield the values that a regression model predicts for each image."""
    return _rows(saved, computing, inputs, lambda outputs, _: {"values": outputs.double().flatten().tolist()})


def write_masks(saved: SavedModel, computing: Computing, inputs: Sequence[str], folder: Path) -> Iterator[Row]:
    """Write a segmentation mask for each image into `folder`. Yield the fraction of pixels in each class.

    A mask is a grayscale PNG with the size and name of its image. Its pixel values are class indices.
    """
    names = saved.facts.classes or []
    if len(names) > _MAX_MASK_CLASSES:
        raise UsageError(
            f"{saved.path}: the run has {len(names)} classes, but a mask can hold at most {_MAX_MASK_CLASSES}; use "
            f"lockstep.load"
        )
    files = files_of(inputs)
    targets = {file: folder / f"{file.stem}.png" for file in files}
    if len({*targets.values()}) < len(targets):
        raise UsageError(f"--out {folder}: two images have the same name; run predict once for each folder of images")
    existing = next((target for target in targets.values() if target.exists()), None)
    if existing is not None:
        raise UsageError(f"{existing}: already exists; use a different folder in --out")
    folder.mkdir(parents=True, exist_ok=True)

    def row(outputs: Tensor, image: LoadedImage) -> Row:
        numbers = outputs.argmax(0)
        height, width = image.size
        mask = Image.fromarray(numbers.to(torch.uint8).numpy()).resize((width, height), Image.Resampling.NEAREST)
        mask.save(targets[image.file])
        shares = torch.bincount(numbers.flatten(), minlength=len(names)).double() / numbers.numel()
        order = shares.argsort(descending=True, stable=True).tolist()
        classes = [{"class": names[number], "share": float(shares[number])} for number in order if shares[number]]
        return {"mask": str(targets[image.file]), "classes": classes}

    return _rows(saved, computing, inputs, row)


def top_classes(outputs: Tensor, top: int) -> TopClasses:
    """Return the `top` most likely classes by softmax. `outputs` are the logits, floats of shape [classes]."""
    probabilities = outputs.double().softmax(0)
    order = probabilities.argsort(descending=True, stable=True)[:top]
    return TopClasses(order.tolist(), probabilities[order].tolist())


def _rows(
    saved: SavedModel, computing: Computing, inputs: Sequence[str], row: Callable[[Tensor, LoadedImage], Row]
) -> Iterator[Row]:
    """Yield the result of `row` for each image. `row` is called with the outputs of the model on the CPU.

    For an image that can't be read, the result has the key `skipped` with the reason.
    """
    view, files = preprocessing_of(saved), files_of(inputs)
    change = device_transforms(values(saved.recipe), saved.known)
    assert change is not None
    for first in range(0, len(files), computing.batch):
        images: list[LoadedImage] = []
        reasons: dict[Path, str] = {}
        for file in files[first : first + computing.batch]:
            try:
                images.append(LoadedImage(file, *view.sample(file)))
            except UsageError as error:
                reasons[file] = str(error)
        rows = {}
        if images:
            samples = torch.stack([image.sample for image in images]).to(computing.device)
            fetched = samples, torch.zeros(len(samples), device=computing.device)
            outputs = predictions(computing((change.for_evaluation(fetched)[0],)), saved.name).cpu()
            rows = {image.file: row(output, image) for image, output in zip(images, outputs, strict=True)}
        for file in files[first : first + computing.batch]:
            yield {"input": str(file), **(rows[file] if file in rows else {"skipped": reasons[file]})}
