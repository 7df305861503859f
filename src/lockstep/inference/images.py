"""Inference on new images, using the same decoding, cropping, resizing and normalization as evaluations of the run."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
from PIL import Image
from torch import Tensor

from lockstep.common import plainfile
from lockstep.config.base import section_to_dict
from lockstep.data.images.decoding import UndecodableError, decode
from lockstep.data.images.device_transforms import make_device_transforms
from lockstep.data.images.lazy_images import CropSettings, crop_image, to_sample
from lockstep.data.images.scan import IMAGE_SUFFIXES, iterate_images
from lockstep.errors import UsageError, convert_error, convert_os_error
from lockstep.inference.polarity import describe_inverted, find_polarity
from lockstep.inference.saved import EvaluationModel, SavedModel
from lockstep.tasks.batches import get_predictions

_CHANNEL_COUNTS: Final = (1, 3)  # grayscale and RGB
_MAX_MASK_CLASSES: Final = 256  # masks store each class index in a single byte

Row = dict[str, Any]  # JSON-compatible
Warn = Callable[[str], None]  # called with a warning for the user


class TopClasses(NamedTuple):
    """The indices and probabilities of the most likely classes, with the most likely class first."""

    class_indices: list[int]
    probabilities: list[float]


class LoadedImage(NamedTuple):
    """The path of an image file, the preprocessed sample, and the original height and width of the image."""

    file: Path
    sample: Tensor
    size: tuple[int, int]


@final
@dataclass(frozen=True)
class ImagePreprocessing:
    """Converts image files to samples of `shape` [channels, height, width].

    If `crop` is None, the full image is resized instead of cropped. `exif` is whether to apply the EXIF orientation.
    """

    shape: tuple[int, int, int]
    crop: CropSettings | None
    exif: bool

    def load_sample(self, file: Path) -> tuple[Tensor, tuple[int, int]]:
        """Load an image. Return the sample as a uint8 tensor, and the original height and width of the image.

        Raises UsageError if the file can't be read.
        """
        read_errors = convert_os_error(UsageError, f"{file}: cannot be read", "; pass an image, or a folder of images")
        with read_errors, plainfile.open_reader(file, links=True) as stream:
            content = bytearray(stream.read())
        with convert_error(
            UsageError, UndecodableError, f"{file}: cannot be read as an image", "; convert or remove it"
        ):
            pixels = decode(content, self.exif)
        size = (pixels.shape[1], pixels.shape[2])
        return to_sample(crop_image(pixels, self.crop) if self.crop else pixels, *self.shape), size


def get_preprocessing(saved: SavedModel) -> ImagePreprocessing:
    """Return the image preprocessing that evaluations of the run use.

    Raises UsageError if Lockstep can't preprocess images for this run.
    """
    facts, data = saved.dataset_info, saved.recipe.data
    shape = tuple(facts.shape or ())
    if len(shape) != 3 or shape[0] not in _CHANNEL_COUNTS:
        description = f"shape {list(shape)}" if shape else "no single shape"
        raise UsageError(
            f"{saved.path}: samples of dataset {data.name} have {description}, but images have 1 or 3 channels, height "
            f"and width; predict supports images, tables (.csv, .parquet) and prompts; for other inputs, use "
            f"lockstep.load"
        )
    if make_device_transforms(section_to_dict(saved.recipe), saved.stored_dataset_info) is None:
        raise UsageError(
            f"{saved.path}: dataset {data.name} returns images as floats, so predict does not know how to convert new "
            f"images; return uint8 images, which Lockstep normalizes with recipe.data.mean and recipe.data.std"
        )
    return ImagePreprocessing((shape[0], shape[1], shape[2]), saved.crop_settings, data.exif)


def find_image_files(inputs: Sequence[str]) -> list[Path]:
    """Return the image files in `inputs`. Folders are searched recursively, and their files are sorted by name.

    Raises UsageError if a file doesn't exist or a folder contains no images.
    """
    files: list[Path] = []
    for name in inputs:
        folder_files = [Path(path) for path in iterate_images(name)] if os.path.isdir(name) else [Path(name)]
        if not folder_files:
            raise UsageError(f"{name}: contains no images; their names must end in {', '.join(IMAGE_SUFFIXES)}")
        files += folder_files
    missing_file = next((file for file in files if not file.exists()), None)
    if missing_file is not None:
        raise UsageError(f"{missing_file}: not found; pass images, or folders of images")
    return files


def classify(saved: SavedModel, model: EvaluationModel, inputs: Sequence[str], top: int, warn: Warn) -> Iterator[Row]:
    """Yield a prediction for each image with the `top` most likely classes, starting with the most likely class."""
    names = saved.dataset_info.classes or []

    def make_row(outputs: Tensor, image: LoadedImage) -> Row:
        result = get_top_classes(outputs, min(top, len(names)))
        pairs = zip(result.class_indices, result.probabilities, strict=True)
        return {"classes": [{"class": names[number], "probability": p} for number, p in pairs]}

    return _predict_images(saved, model, inputs, make_row, warn)


def regress(saved: SavedModel, model: EvaluationModel, inputs: Sequence[str], warn: Warn) -> Iterator[Row]:
    """Yield a prediction for each image with the output values of a regression model."""

    def make_row(outputs: Tensor, _: LoadedImage) -> Row:
        return {"values": outputs.double().flatten().tolist()}

    return _predict_images(saved, model, inputs, make_row, warn)


def write_masks(
    saved: SavedModel, model: EvaluationModel, inputs: Sequence[str], folder: Path, warn: Warn
) -> Iterator[Row]:
    """Write a segmentation mask for each image into `folder`. Yield its path and the fraction of pixels in each class.

    The mask is a grayscale PNG file with the same name and size as the image. Its pixel values are class indices.
    """
    names = saved.dataset_info.classes or []
    if len(names) > _MAX_MASK_CLASSES:
        raise UsageError(
            f"{saved.path}: the run has {len(names)} classes, but a mask can hold at most {_MAX_MASK_CLASSES}; use "
            f"lockstep.load"
        )
    files = find_image_files(inputs)
    mask_paths = {file: folder / f"{file.stem}.png" for file in files}
    if len({*mask_paths.values()}) < len(mask_paths):
        raise UsageError(f"--out {folder}: two images have the same name; run predict once for each folder of images")
    existing = next((mask_path for mask_path in mask_paths.values() if mask_path.exists()), None)
    if existing is not None:
        raise UsageError(f"{existing}: already exists; use a different folder in --out")
    folder.mkdir(parents=True, exist_ok=True)

    def make_row(outputs: Tensor, image: LoadedImage) -> Row:
        class_indices = outputs.argmax(0)
        height, width = image.size
        mask = Image.fromarray(class_indices.to(torch.uint8).numpy()).resize((width, height), Image.Resampling.NEAREST)
        mask.save(mask_paths[image.file])
        shares = torch.bincount(class_indices.flatten(), minlength=len(names)).double() / class_indices.numel()
        order = shares.argsort(descending=True, stable=True).tolist()
        classes = [{"class": names[number], "share": float(shares[number])} for number in order if shares[number]]
        return {"mask": str(mask_paths[image.file]), "classes": classes}

    return _predict_images(saved, model, inputs, make_row, warn)


def get_top_classes(outputs: Tensor, top: int) -> TopClasses:
    """Return the `top` most likely classes. `outputs` contains the logits of a sample, of shape [classes]."""
    probabilities = outputs.double().softmax(0)
    order = probabilities.argsort(descending=True, stable=True)[:top]
    return TopClasses(order.tolist(), probabilities[order].tolist())


def _predict_images(
    saved: SavedModel,
    model: EvaluationModel,
    inputs: Sequence[str],
    make_row: Callable[[Tensor, LoadedImage], Row],
    warn: Warn,
) -> Iterator[Row]:
    """Yield a prediction for each image, which `make_row` creates from the model outputs on the CPU.

    If an image can't be read, the prediction contains the reason as `skipped` instead. If images look inverted
    compared to the training images, `warn` is called after the last prediction.
    """
    polarity, inverted = find_polarity(*saved.mean_and_std), list[tuple[str, float]]()
    preprocessing, files = get_preprocessing(saved), find_image_files(inputs)
    transforms = make_device_transforms(section_to_dict(saved.recipe), saved.stored_dataset_info)
    assert transforms is not None
    for first in range(0, len(files), model.batch_size):
        images: list[LoadedImage] = []
        reasons: dict[Path, str] = {}
        for file in files[first : first + model.batch_size]:
            try:
                images.append(LoadedImage(file, *preprocessing.load_sample(file)))
            except UsageError as error:
                reasons[file] = str(error)
        rows = {}
        if images:
            samples = torch.stack([image.sample for image in images]).to(model.device)
            fetched = samples, torch.zeros(len(samples), device=model.device)
            outputs = get_predictions(model((transforms.transform_evaluation_batch(fetched)[0],)), saved.name).cpu()
            rows = {image.file: make_row(output, image) for image, output in zip(images, outputs, strict=True)}
        for image in images:
            if polarity and (brightness := polarity.measure_inverted(image.sample)) is not None:
                inverted.append((str(image.file), brightness))
        for file in files[first : first + model.batch_size]:
            yield {"input": str(file), **(rows[file] if file in rows else {"skipped": reasons[file]})}
    if polarity and inverted:
        warn(describe_inverted(polarity, inverted))
