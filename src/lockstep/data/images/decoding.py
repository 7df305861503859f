"""Decodes an image file from bytes to pixels."""

import re
from io import BytesIO
from typing import Final

import numpy as np
import torch
import torchvision  # noqa: F401 - its import registers torch.ops.image
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

_RGB: Final = 3  # torchvision.io.ImageReadMode.RGB
_BUILD_PATH: Final = re.compile(
    r"^[^,]*, \S+\.cpp:\d+, "
)  # the build path of torchvision, in the errors of its decoders
_PPM: Final = re.compile(rb"P6\n(\d{1,9}) (\d{1,9})\n255\n")  # the header as Pillow and `lockstep prepare` write it
_ROTATIONS: Final = (2, 3, 4, 5, 6, 7, 8)  # values of EXIF's orientation; 1 is upright, and others have no meaning


class UndecodableError(ValueError):
    """The bytes are not an image, or the image is damaged."""


def decode(content: bytearray, upright: bool) -> Tensor:
    """Return the RGB image as uint8 of shape [3, height, width], with the channels of a pixel contiguous in memory.

    Reads every format that Pillow reads. If `upright` is True, applies the rotation or reflection from the EXIF
    metadata, because cameras store the rows of the sensor and record how they were held. Raises UndecodableError with
    the reason in one line.
    """
    try:
        return _decode_image(content, upright)
    except MemoryError:
        raise
    except Exception as error:  # decoders of invalid bytes raise OSError, SyntaxError, struct.error, ...
        raise UndecodableError(_reason(error, content)) from error


def as_ppm(pixels: Tensor) -> bytes:
    """Return an image, uint8 of shape [3, height, width], as a PPM file.

    `decode` reads such a file without copying the pixels.
    """
    _, height, width = pixels.shape
    return f"P6\n{width} {height}\n255\n".encode() + pixels.permute(1, 2, 0).numpy().tobytes()


def _decode_image(content: bytearray, upright: bool) -> Tensor:
    if (ppm_pixels := _from_ppm(content)) is not None:
        return ppm_pixels
    with Image.open(BytesIO(content)) as image:
        if image.format != "JPEG":
            image.load()  # a damaged image raises here, not below, where PNG's loader reads the metadata
        if upright and _orientation(image) in _ROTATIONS:
            return _pixels(ImageOps.exif_transpose(image))
        if image.format == "JPEG" and image.mode in ("RGB", "L"):
            return _jpeg(content, image)
        return _pixels(image)


def _from_ppm(content: bytearray) -> Tensor | None:
    """Return a view of the pixels of a PPM file, or None if it is a different or a truncated file."""
    header = _PPM.match(content)
    width, height = map(int, header.groups()) if header else (0, 0)
    count = width * height * 3
    if header is None or not 0 < count <= len(content) - header.end():
        return None
    pixels = torch.frombuffer(content, dtype=torch.uint8, count=count, offset=header.end())
    return pixels.view(height, width, 3).permute(2, 0, 1)


def _orientation(image: Image.Image) -> object:
    if "exif" not in image.info:
        return None
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # the image itself may be intact; Pillow raises any error for damaged metadata
        return None


def _jpeg(content: bytearray, image: Image.Image) -> Tensor:
    # torchvision decodes to the same bits as Pillow, but faster. This calls the operator directly, since torchvision.io
    # warns in each call from 0.29 on that it will be removed. Without the operator, Pillow decodes the image.
    try:
        operator = torch.ops.image.decode_jpeg
    except AttributeError:
        return _pixels(image)
    pixels: Tensor = operator(torch.frombuffer(content, dtype=torch.uint8), _RGB, False)
    return pixels


def _pixels(image: Image.Image) -> Tensor:
    if image.mode.startswith(("I", "F")):  # Pillow would clip values above 255: a 16-bit image would become white
        raise ValueError(f"its values do not fit into 8 bits (Pillow mode {image.mode})")
    # Convert palettes by way of RGBA, because Pillow warns about palettes with transparency.
    converted = image.convert("RGBA") if image.mode == "P" else image
    return torch.from_numpy(np.array(converted.convert("RGB"))).permute(2, 0, 1)


def _reason(error: Exception, content: bytearray) -> str:
    if not content:
        return "the file is empty"
    if isinstance(error, UnidentifiedImageError):  # its message names an internal object
        return "unknown image format"
    return _BUILD_PATH.sub("", str(error).splitlines()[0]) if str(error) else type(error).__name__
