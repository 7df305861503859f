"""Decodes an image file from bytes to pixels."""

import re
import struct
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from typing import Any, Final

import numpy as np
import torch
import torchvision  # noqa: F401 - its import registers torch.ops.image
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

_RGB: Final = 3  # torchvision.io.ImageReadMode.RGB
# The path and line of torchvision's source code, which its decoders include in error messages.
_SOURCE_LOCATION: Final = re.compile(r"^[^,]*, \S+\.cpp:\d+, ")
_PPM: Final = re.compile(rb"P6\n(\d{1,9}) (\d{1,9})\n255\n")  # the PPM header that Pillow and `lockstep prepare` write
_ROTATIONS: Final = (2, 3, 4, 5, 6, 7, 8)  # EXIF orientations of rotated or flipped images

# The segments of a JPEG file (ITU-T T.81, table B.1) begin with a marker and a length, which counts its own two bytes.
_JPEG_START: Final = b"\xff\xd8"
_JPEG_SEGMENT: Final = struct.Struct(">HH")
_JPEG_FRAME: Final = struct.Struct(">BHHB")  # bits per value, height, width, number of components
_FRAMES: Final = (0xFFC0, 0xFFC1, 0xFFC2)  # baseline, extended sequential, progressive
_SCAN: Final = 0xFFDA
_TABLES: Final = (0xFFC4, 0xFFDB, 0xFFDD, 0xFFFE)  # Huffman tables, quantization tables, restart interval, comment
_JFIF: Final = b"\xff\xe0\0\x10JFIF\0"  # the start of a JFIF segment without a thumbnail


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
    operator = _find_jpeg_operator()
    if operator is not None and _is_plain_jpeg(content):
        with suppress(RuntimeError):  # if the image is damaged, report Pillow's error instead, if there is one
            return _decode_jpeg(operator, content)
    with Image.open(BytesIO(content)) as image:
        if image.format != "JPEG":
            image.load()  # raises for damaged images; otherwise, reading the metadata of a PNG file would raise below
        if upright and _read_orientation(image) in _ROTATIONS:
            return _to_tensor(ImageOps.exif_transpose(image))
        if operator is not None and image.format == "JPEG" and image.mode in ("RGB", "L"):
            return _decode_jpeg(operator, content)
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


def _is_plain_jpeg(content: bytearray) -> bool:
    """Return whether this is a gray or RGB JPEG file without metadata except JFIF and comments.

    Such a file has no EXIF orientation, so Pillow doesn't need to open it.
    Returns False if in doubt, or if Pillow would warn about the size of the image.
    """
    if not content.startswith(_JPEG_START):
        return False
    position, has_frame = len(_JPEG_START), False
    while position + _JPEG_SEGMENT.size <= len(content):
        marker, length = _JPEG_SEGMENT.unpack_from(content, position)
        if marker == _SCAN:
            return has_frame
        if marker in _FRAMES and not has_frame:
            has_frame = _is_plain_frame(content[position + _JPEG_SEGMENT.size : position + 2 + length])
            if not has_frame:
                return False
        elif marker not in _TABLES and not content.startswith(_JFIF, position):
            return False
        position += 2 + length
    return False


def _is_plain_frame(frame_header: bytearray) -> bool:
    if len(frame_header) < _JPEG_FRAME.size:
        return False
    bits, height, width, components = _JPEG_FRAME.unpack_from(frame_header)
    limit = Image.MAX_IMAGE_PIXELS
    return (
        bits == 8
        and components in (1, 3)
        and len(frame_header) == _JPEG_FRAME.size + 3 * components
        and height * width > 0
        and (limit is None or height * width <= limit)
    )


def _find_jpeg_operator() -> Callable[..., Any] | None:
    # torchvision's decoder is bit-identical to Pillow's, but faster. Call the operator directly, because torchvision.io
    # emits a deprecation warning in each call since version 0.29. Without the operator, fall back to Pillow.
    operator: Callable[..., Any] | None = getattr(torch.ops.image, "decode_jpeg", None)
    return operator


def _decode_jpeg(decode_operator: Callable[..., Any], content: bytearray) -> Tensor:
    pixels: Tensor = decode_operator(torch.frombuffer(content, dtype=torch.uint8), _RGB, False)
    return pixels


def _to_tensor(image: Image.Image) -> Tensor:
    if image.mode.startswith(("I", "F")):  # Pillow would clip values above 255, so a 16-bit image would be white
        raise ValueError(f"pixel values do not fit into 8 bits (Pillow mode {image.mode})")
    # Convert palette images to RGBA first, because Pillow warns about palettes with transparency.
    converted = image.convert("RGBA") if image.mode == "P" else image
    return torch.from_numpy(np.array(converted.convert("RGB"))).permute(2, 0, 1)


def _describe_error(error: Exception, content: bytearray) -> str:
    if not content:
        return "the file is empty"
    if isinstance(error, UnidentifiedImageError):  # the message only contains the repr of a BytesIO object
        return "unknown image format"
    return _SOURCE_LOCATION.sub("", str(error).splitlines()[0]) if str(error) else type(error).__name__
