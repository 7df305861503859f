"""Decoding: the bits of Pillow, whatever the file's form and whoever decodes it."""

import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from test_folder import saved, smooth_picture

from lockstep.data.images import decoding
from lockstep.data.images.decoding import UndecodableError, decode


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}])
def test_jpegs_have_pillows_bits(options: dict[str, object]) -> None:
    for seed, (height, width) in enumerate([(375, 500), (61, 83), (1, 9)]):
        content = saved(smooth_picture(seed, height, width), "JPEG", **options)
        expected = torch.from_numpy(np.array(Image.open(io.BytesIO(content)))).permute(2, 0, 1)
        assert torch.equal(decode(content, upright=True), expected)


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
    content = saved(change(smooth_picture(3)), form)
    pixels = decode(content, upright=True)
    assert pixels.shape == (3, 60, 80)
    assert pixels.dtype == torch.uint8
    image = Image.open(io.BytesIO(content))
    image = image.convert("RGBA") if image.mode == "P" else image
    assert torch.equal(pixels, torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1))


def _noted(orientation: object) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(10))  # 0 and 9 mean nothing
def test_images_are_turned_upright_as_exif_says(form: str, orientation: int) -> None:
    content = saved(smooth_picture(3), form, exif=_noted(orientation))
    stored = Image.open(io.BytesIO(content)).convert("RGB")
    # The upper left corner of what is to be seen is, in the stored rows: 1 upper left, 2 upper right, 3 lower right,
    # 4 lower left; from 5 on rows and columns change places (EXIF 2.32, table 6).
    rows = torch.from_numpy(np.array(stored)).permute(2, 0, 1)
    mirrored = {2: (2,), 3: (1, 2), 4: (1,), 5: (), 6: (1,), 7: (1, 2), 8: (2,)}.get(orientation, ())
    expected = rows.flip(mirrored) if mirrored else rows
    expected = expected.transpose(1, 2) if orientation in (5, 6, 7, 8) else expected
    seen = decode(content, upright=True)
    assert torch.equal(seen, expected)
    assert seen.permute(1, 2, 0).is_contiguous()  # the resize counts differently on another layout
    assert torch.equal(decode(content, upright=False), rows)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # Pillow says so when it opens the file
def test_damaged_exif_does_not_spoil_an_image() -> None:
    plain = saved(smooth_picture(3), "JPEG")
    content = saved(smooth_picture(3), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f")
    assert torch.equal(decode(content, upright=True), decode(plain, upright=True))


def test_without_torchvisions_operator_pillow_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    content = saved(smooth_picture(3), "JPEG")
    fast = decode(content, upright=True)
    monkeypatch.setattr(torch.ops, "image", object())
    slow = decode(content, upright=True)
    assert torch.equal(fast, slow)
    assert fast.stride() == slow.stride()  # the resize counts differently on another layout


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"restart_marker_blocks": 3}, {"comment": b"by hand"}, {"subsampling": 2}]
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pillow_does_not_open_plain_jpegs(
    mode: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = saved(smooth_picture(3).convert(mode), "JPEG", **options)
    expected = torch.from_numpy(np.array(Image.open(io.BytesIO(content)).convert("RGB"))).permute(2, 0, 1)
    monkeypatch.setattr(Image, "open", None)
    assert torch.equal(decode(content, upright=True), expected)


@pytest.mark.parametrize(
    ("mode", "options"), [("RGB", {"exif": _noted(6)}), ("RGB", {"icc_profile": b"profile"}), ("CMYK", {})]
)
def test_pillow_opens_jpegs_with_metadata_or_four_channels(
    mode: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = saved(smooth_picture(3).convert(mode), "JPEG", **options)
    adobe = content.find(b"\xff\xee\0\x0eAdobe")  # in CMYK files, so remove it to test the number of channels
    if adobe >= 0:
        del content[adobe : adobe + 16]
    assert decode(bytearray(content), upright=True).shape[0] == 3
    monkeypatch.setattr(Image, "open", None)
    with pytest.raises(UndecodableError):
        decode(content, upright=True)


def _result(content: bytearray) -> str | bytes:
    try:
        return decode(bytearray(content), upright=True).numpy().tobytes()
    except UndecodableError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_jpegs_give_the_result_or_the_error_of_opening_them_with_pillow_first(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[dict[str, object]] = [{}, {"progressive": True}, {"restart_marker_blocks": 2}, {"subsampling": 0}]
    intact = saved(smooth_picture(seed, 40, 50), "JPEG", **kinds[seed])
    generator = np.random.default_rng(seed)
    files = [intact[:end] for end in generator.integers(0, len(intact), 20)]
    for _ in range(60):
        damaged = bytearray(intact)
        place = int(generator.integers(len(intact) if generator.random() < 0.5 else 300))
        damaged[place : place + int(generator.integers(3))] = generator.bytes(int(generator.integers(3)))
        files.append(damaged)
    tables = intact.index(b"\xff\xdb")  # Pillow and torchvision report different errors for too long tables
    files.append(intact[: tables + 2] + b"\0\x44\0" + intact[tables + 4 :])
    fast = [_result(file) for file in files]
    monkeypatch.setattr(decoding, "_is_plain_jpeg", lambda content: False)
    assert fast == [_result(file) for file in files]
    assert len({result for result in fast if isinstance(result, str)}) > 1


def test_pillow_refuses_jpegs_with_too_many_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60 * 80 // 2 - 1)
    with pytest.raises(UndecodableError, match="decompression bomb"):
        decode(saved(smooth_picture(3), "JPEG"), upright=True)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_values_beyond_8_bits_are_refused_and_not_cut_off(dtype: type) -> None:
    content = saved(Image.fromarray(np.full((4, 4), 40_000, dtype)), "TIFF")
    with pytest.raises(ValueError, match="do not fit into 8 bits"):
        decode(content, upright=True)
