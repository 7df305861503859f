"""An image file's bytes to pixels."""

import re
from io import BytesIO
from typing import Final

import numpy as np
import torch
import torchvision  # noqa: F401 - its import registers torch.ops.image
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

_RGB: Final = 3  # torchvision.io.ImageReadMode.RGB
_BUILT_AT: Final = re.compile(r"^[^,]*, \S+\.cpp:\d+, ")  # where torchvision was built, in what its decoders raise
_PPM: Final = re.compile(rb"P6\n(\d{1,9}) (\d{1,9})\n255\n")  # its header, as Pillow and `lockstep prepare` write it
_TURNED: Final = (2, 3, 4, 5, 6, 7, 8)  # of the values of EXIF's orientation; 1 is upright, others mean nothing


class UndecodableError(ValueError):
    """Bytes that are no image, or a damaged one."""


def decode(content: bytearray, upright: bool) -> Tensor:
    """Return red, green and blue: uint8 of shape [3, height, width], the channels of a pixel together in memory.

    `upright` applies the rotation or reflection that EXIF notes: cameras store the sensor's rows and say how they were
    held. Reads whatever Pillow reads. UndecodableError says in a line what is wrong with the rest.
    """
    try:
        return _decode_image(content, upright)
    except MemoryError:
        raise
    except Exception as error:  # decoders of strange bytes raise OSError, SyntaxError, struct.error, ...
        raise UndecodableError(_reason(error, content)) from error


def as_ppm(pixels: Tensor) -> bytes:
    """Return a picture, uint8 of shape [3, height, width], as a PPM file, which `decode` takes as it is."""
    _, height, width = pixels.shape
    return f"P6\n{width} {height}\n255\n".encode() + pixels.permute(1, 2, 0).numpy().tobytes()


def _decode_image(content: bytearray, upright: bool) -> Tensor:
    if (plain := _from_ppm(content)) is not None:
        return plain
    with Image.open(BytesIO(content)) as image:
        if image.format != "JPEG":
            image.load()  # what is broken raises here, and not below, where PNG's loader looks for its metadata
        if upright and _orientation(image) in _TURNED:
            return _pixels(ImageOps.exif_transpose(image))
        if image.format == "JPEG" and image.mode in ("RGB", "L"):
            return _jpeg(content, image)
        return _pixels(image)


def _from_ppm(content: bytearray) -> Tensor | None:
    """Return the pixels of a PPM file where they are, none copied; None of other files, and of one that is cut off."""
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
    except Exception:  # damaged metadata of an image that may be whole: Pillow raises whatever it trips over
        return None


def _jpeg(content: bytearray, image: Image.Image) -> Tensor:
    # torchvision decodes to Pillow's bits in less time. The operator, because from 0.29 torchvision.io warns at each
    # call that it will be removed; where it is gone, Pillow does it.
    try:
        operator = torch.ops.image.decode_jpeg
    except AttributeError:
        return _pixels(image)
    pixels: Tensor = operator(torch.frombuffer(content, dtype=torch.uint8), _RGB, False)
    return pixels


def _pixels(image: Image.Image) -> Tensor:
    if image.mode.startswith(("I", "F")):  # Pillow would cut off what is above 255: a 16-bit picture becomes white
        raise ValueError(f"its values do not fit into 8 bits (Pillow's mode {image.mode})")
    # Palettes by way of RGBA, because Pillow warns of those that hold transparency.
    plain = image.convert("RGBA") if image.mode == "P" else image
    return torch.from_numpy(np.array(plain.convert("RGB"))).permute(2, 0, 1)


def _reason(error: Exception, content: bytearray) -> str:
    if not content:
        return "it is empty"
    if isinstance(error, UnidentifiedImageError):  # which names an object of ours
        return "it has no image format that is known"
    return _BUILT_AT.sub("", str(error).splitlines()[0]) if str(error) else type(error).__name__
