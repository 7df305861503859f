"""Decoding: the bits of Pillow, whatever the file's form and whoever decodes it."""

import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data.decoding import decode


def _picture(seed: int, height: int = 60, width: int = 80) -> Image.Image:
    """A smooth picture, because JPEG of plain noise is no picture at all."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def _saved(image: Image.Image, form: str, **options: object) -> bytearray:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return bytearray(stream.getvalue())


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}])
def test_jpegs_have_pillows_bits(options: dict[str, object]) -> None:
    for seed, (height, width) in enumerate([(375, 500), (61, 83), (1, 9)]):
        content = _saved(_picture(seed, height, width), "JPEG", **options)
        expected = torch.from_numpy(np.array(Image.open(io.BytesIO(content)))).permute(2, 0, 1)
        assert torch.equal(decode(content), expected)


def _palette(picture: Image.Image) -> Image.Image:
    image = picture.quantize(16)
    image.info["transparency"] = bytes([0] * 16)
    return image


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("JPEG", lambda picture: picture.convert("L")),
        ("JPEG", lambda picture: picture.convert("CMYK")),
        ("PNG", lambda picture: picture),
        ("PNG", lambda picture: picture.convert("L")),
        ("PNG", lambda picture: picture.convert("LA")),
        ("PNG", lambda picture: picture.convert("RGBA")),
        ("PNG", lambda picture: picture.convert("1")),
        ("PNG", _palette),
        ("WEBP", lambda picture: picture),
        ("BMP", lambda picture: picture),
        ("TIFF", lambda picture: picture),
        ("PPM", lambda picture: picture),
    ],
)
def test_every_kind_becomes_red_green_and_blue(form: str, change: Callable[[Image.Image], Image.Image]) -> None:
    content = _saved(change(_picture(3)), form)
    pixels = decode(content)
    assert pixels.shape == (3, 60, 80)
    assert pixels.dtype == torch.uint8
    image = Image.open(io.BytesIO(content))
    image = image.convert("RGBA") if image.mode == "P" else image
    assert torch.equal(pixels, torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1))


def test_grey_is_equal_in_all_channels() -> None:
    pixels = decode(_saved(_picture(3).convert("L"), "JPEG"))
    assert torch.equal(pixels[0], pixels[1])
    assert torch.equal(pixels[0], pixels[2])


def test_rotations_in_exif_are_not_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by a quarter
    assert decode(_saved(_picture(3), "JPEG", exif=exif)).shape == (3, 60, 80)


def test_without_torchvisions_operator_pillow_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    content = _saved(_picture(3), "JPEG")
    fast = decode(content)
    monkeypatch.setattr(torch.ops, "image", object())
    slow = decode(content)
    assert torch.equal(fast, slow)
    assert fast.stride() == slow.stride()  # the resize counts differently on another layout


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_values_beyond_8_bits_are_refused_and_not_cut_off(dtype: type) -> None:
    content = _saved(Image.fromarray(np.full((4, 4), 40_000, dtype)), "TIFF")
    with pytest.raises(ValueError, match="do not fit into 8 bits"):
        decode(content)
