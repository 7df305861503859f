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
)  # the path and line of torchvision's source code, which its decoders include in error messages
_PPM: Final = re.compile(rb"P6\n(\d{1,9}) (\d{1,9})\n255\n")  # the PPM header that Pillow and `lockstep prepare` write
_ROTATIONS: Final = (2, 3, 4, 5, 6, 7, 8)  # EXIF orientations of rotated or flipped images


class UndecodableError(ValueError):
    """Raised if the bytes aren't an image, or if the image is damaged."""


def decode(content: bytearray, upright: bool) -> Tensor:
    """Decode an image file to RGB, uint8 of shape [3, height, width], with channels last in memory.

    Supports all formats that Pillow supports. If `upright` is True, the EXIF orientation is applied, because cameras
    store images as the sensor captured them. Raises UndecodableError with the reason as a single line.
    """
    try:
        return _decode_image(content, upright)
    except MemoryError:
        raise
    except Exception as error:  # for invalid bytes, decoders raise OSError, SyntaxError, struct.error, ...
        raise UndecodableError(_describe_error(error, content)) from error


def encode_ppm(pixels: Tensor) -> bytes:
    """Encode an image, uint8 of shape [3, height, width], as a PPM file.

    `decode` can read this format without copying the pixels.
    """
    _, height, width = pixels.shape
    return f"P6\n{width} {height}\n255\n".encode() + pixels.permute(1, 2, 0).numpy().tobytes()


def _decode_image(content: bytearray, upright: bool) -> Tensor:
    if (ppm_pixels := _decode_ppm(content)) is not None:
        return ppm_pixels
    with Image.open(BytesIO(content)) as image:
        if image.format != "JPEG":
            image.load()  # raises for damaged images; otherwise, reading the metadata of a PNG file would raise below
        if upright and _read_orientation(image) in _ROTATIONS:
            return _to_tensor(ImageOps.exif_transpose(image))
        if image.format == "JPEG" and image.mode in ("RGB", "L"):
            return _decode_jpeg(content, image)
        return _to_tensor(image)


def _decode_ppm(content: bytearray) -> Tensor | None:
    """Return a view of the pixels in a PPM file, or None for a different format or a truncated file."""
    header = _PPM.match(content)
    width, height = map(int, header.groups()) if header else (0, 0)
    count = width * height * 3
    if header is None or not 0 < count <= len(content) - header.end():
        return None
    pixels = torch.frombuffer(content, dtype=torch.uint8, count=count, offset=header.end())
    return pixels.view(height, width, 3).permute(2, 0, 1)


def _read_orientation(image: Image.Image) -> object:
    if "exif" not in image.info:
        return None
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # Pillow may raise any exception for damaged metadata, but the image itself may be intact
        return None


def _decode_jpeg(content: bytearray, image: Image.Image) -> Tensor:
    # torchvision returns the same bits as Pillow, but is faster. Call the operator directly, because torchvision.io
    # warns about its future removal in each call since version 0.29. If the operator is missing, fall back to Pillow.
    try:
        operator = torch.ops.image.decode_jpeg
    except AttributeError:
        return _to_tensor(image)
    pixels: Tensor = operator(torch.frombuffer(content, dtype=torch.uint8), _RGB, False)
    return pixels


def _to_tensor(image: Image.Image) -> Tensor:
    if image.mode.startswith(("I", "F")):  # Pillow would clip values above 255, so a 16-bit image would be white
        raise ValueError(f"its values do not fit into 8 bits (Pillow mode {image.mode})")
    # Convert palette images to RGBA first, because Pillow warns about palettes with transparency.
    converted = image.convert("RGBA") if image.mode == "P" else image
    return torch.from_numpy(np.array(converted.convert("RGB"))).permute(2, 0, 1)


def _describe_error(error: Exception, content: bytearray) -> str:
    if not content:
        return "the file is empty"
    if isinstance(error, UnidentifiedImageError):  # the message only contains the repr of a BytesIO object
        return "unknown image format"
    return _BUILD_PATH.sub("", str(error).splitlines()[0]) if str(error) else type(error).__name__
