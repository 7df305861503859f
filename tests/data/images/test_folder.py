"""Images from folders: torchvision's pixels, random numbers that follow from the sample, and broken files."""

import io
import os
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional

from lockstep.core import random
from lockstep.data.base import DataSet
from lockstep.data.images.crops import NUM_DRAWS, compute_random_crop_box
from lockstep.data.images.lazy_images import CropSettings, crop_image, to_sample
from lockstep.data.request import DataRequest
from lockstep.data.sources import open_data
from lockstep.errors import TrainingError
from lockstep.tasks.classification import SKIPPED

SIZE = 32


def smooth_picture(seed: int, height: int = 60, width: int = 80) -> Image.Image:
    """A smooth picture, because JPEG of plain noise is no picture at all."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split, count in (("train", 4), ("val", 2)):
        for number, name in enumerate(("cat", "dog")):
            (tmp_path / split / name).mkdir(parents=True)
            for each in range(count):
                file = tmp_path / split / name / f"{each}.jpg"
                smooth_picture(100 * number + each, 40 + 10 * each, 90 - 9 * each).save(file)
    return tmp_path


def _open(root: Path, scale: tuple[float, float] | None = None, skips: bool = False, exif: bool = True) -> DataSet:
    on_error: Literal["raise", "skip"] = "skip" if skips else "raise"
    crop = {"resized_crop": scale is not None, "resized_crop_scale": scale or (0.08, 1.0)}
    request = DataRequest("folder", str(root), on_error=on_error, image_size=SIZE, resize_size=40, exif=exif, **crop)
    return open_data(request)


def _pixels(file: Path) -> Tensor:
    return torch.from_numpy(np.array(Image.open(file).convert("RGB"))).permute(2, 0, 1)


def test_what_the_model_must_know(root: Path) -> None:
    data = _open(root)
    assert data.facts["classes"] == ["cat", "dog"]
    assert data.facts["shape"] == [3, SIZE, SIZE]
    assert data.facts["mean"] == [0.485, 0.456, 0.406]
    assert (len(data.train), len(data.validation)) == (8, 4)
    assert not data.train.in_memory


def test_validation_is_torchvisions_resize_and_center_crop(root: Path) -> None:
    images, targets = _open(root).validation.fetch(np.array([3, 0]), None)
    assert images.dtype == torch.uint8
    assert images.is_contiguous()
    assert targets.tolist() == [1, 0]
    for image, file in zip(images, ("dog/1.jpg", "cat/0.jpg"), strict=True):
        resized = functional.resize(_pixels(root / "val" / file), [40], antialias=True)
        assert torch.equal(image, functional.center_crop(resized, [SIZE, SIZE]))


def test_training_is_torchvisions_resized_crop(root: Path) -> None:
    indices = np.array([5, 2])
    images, targets = _open(root, (0.08, 1.0)).train.fetch(indices, 11)
    assert targets.tolist() == [1, 0]
    drawn = random.draw_uniform(random.make_key(random.AUGMENT, 11), indices, NUM_DRAWS).tolist()
    for image, file, numbers in zip(images, ("dog/1.jpg", "cat/2.jpg"), drawn, strict=True):
        pixels = _pixels(root / "train" / file)
        box = compute_random_crop_box(pixels.shape[1], pixels.shape[2], (0.08, 1.0), numbers)
        assert torch.equal(image, functional.resized_crop(pixels, *box, [SIZE, SIZE], antialias=True))


@pytest.mark.parametrize(("height", "width"), [(60, 80), (33, 31), (7, 90), (1, 1)])
def test_every_box_is_resized_as_torchvision_does(height: int, width: int) -> None:
    pixels = torch.from_numpy(np.array(smooth_picture(5, height, width))).permute(2, 0, 1)
    settings = CropSettings(SIZE, SIZE, (0.01, 1.0))
    for draws in np.random.default_rng(0).random((40, NUM_DRAWS)).tolist():
        box = compute_random_crop_box(height, width, (0.01, 1.0), draws)
        expected = functional.resized_crop(pixels, *box, [SIZE, SIZE], antialias=True)
        assert torch.equal(crop_image(pixels, settings, draws), expected)


def test_a_sample_does_not_depend_on_its_batch_but_on_the_draw(root: Path) -> None:
    split = _open(root, (0.08, 1.0)).train
    whole, _ = split.fetch(np.arange(8), 1)
    assert torch.equal(whole[[6, 1]], split.fetch(np.array([6, 1]), 1)[0])
    assert not torch.equal(whole, split.fetch(np.arange(8), 2)[0])


def test_without_a_scale_training_is_seen_as_validation_is(root: Path) -> None:
    split = _open(root).train
    assert torch.equal(split.fetch(np.arange(8), 1)[0], split.fetch(np.arange(8), None)[0])
    cropped = _open(root, (0.08, 0.5))
    assert torch.equal(cropped.train.fetch(np.arange(8), None)[0], split.fetch(np.arange(8), None)[0])


def test_no_samples_keep_their_shape(root: Path) -> None:
    images, targets = _open(root, (0.08, 1.0)).train.fetch(np.array([], np.int64), 1)
    assert images.shape == (0, 3, SIZE, SIZE)
    assert targets.dtype == torch.int64


def saved(image: Image.Image, form: str, **options: object) -> bytearray:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return bytearray(stream.getvalue())


def _broken() -> dict[str, bytes]:
    jpeg, png = saved(smooth_picture(1), "JPEG"), saved(smooth_picture(1), "PNG")
    return {
        "empty": b"",
        "text": b"<html>404 not found</html>",
        "start of a JPEG": jpeg[:100],
        "half a JPEG": jpeg[: len(jpeg) // 2],
        "nearly a JPEG": jpeg[:-60],
        "half a PNG": png[: len(png) // 2],
        "a PNG with a flipped bit": png[:200] + bytes([png[200] ^ 1]) + png[201:],
    }


def test_files_that_are_no_images_are_a_warning(root: Path) -> None:
    assert _open(root).warnings == ()
    for name in ("Thumbs.db", "1.a\nb", "1.gif", "cat/2.GIF", "cat/x", "._1.jpg", "3.jpg", "1.txt", "2.txt", "cat/3"):
        (root / "train" / name).touch()
    (told,) = _open(root).warnings
    assert told.startswith(
        r"dataset folder: files ignored: 10 (2 .gif, 2 .txt, 2 without a suffix, 1 .a\nb, 1 .db, 2 other); "
    )
    assert told.endswith("in a class folder, and end in .bmp, .jpeg, .jpg, .pgm, .png, .ppm, .tif, .tiff, .webp")


@pytest.mark.parametrize("kind", _broken())
def test_a_broken_file_is_named(root: Path, kind: str) -> None:
    file = root / "train" / "dog" / "1.jpg"
    file.write_bytes(_broken()[kind])
    with pytest.raises(TrainingError) as caught:
        _open(root).train.fetch(np.arange(8), None)
    said = str(caught.value)
    assert said.startswith(f"{file}: cannot be read as an image: ")
    assert said.endswith("; convert or remove it, or set recipe.data.on_error=skip")
    assert "\n" not in said
    assert ".cpp" not in said  # where a decoder was built
    assert (": the file is empty;" in said) == (kind == "empty")


@pytest.mark.parametrize("kind", _broken())
def test_a_broken_file_is_skipped_as_zeros_without_a_target(root: Path, kind: str) -> None:
    whole, labels = _open(root, (0.08, 1.0)).train.fetch(np.arange(8), 1)
    (root / "train" / "dog" / "1.jpg").write_bytes(_broken()[kind])
    images, targets = _open(root, (0.08, 1.0), skips=True).train.fetch(np.arange(8), 1)
    assert targets.tolist() == [0, 0, 0, 0, 1, SKIPPED, 1, 1]
    assert images[5].count_nonzero() == 0
    others = [0, 1, 2, 3, 4, 6, 7]
    assert torch.equal(images[others], whole[others])
    assert torch.equal(targets[others], labels[others])


@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_an_image_that_may_never_end_is_not_read(root: Path, kind: str) -> None:
    file = root / "train" / "cat" / "0.jpg"
    if kind == "link":  # to an image, as many data sets are made
        file.rename(root / "elsewhere")
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if kind == "device" else root / "elsewhere")
    data = _open(root, skips=True).train
    if kind == "link":
        assert len(data.fetch(np.array([0]), None)[0]) == 1
    else:
        with pytest.raises(TrainingError, match=r"cat/0\.jpg: cannot be read: it is not a regular file; remove it"):
            data.fetch(np.array([0]), None)


def test_a_file_that_has_gone_is_never_skipped(root: Path) -> None:
    data = _open(root, skips=True)
    (root / "train" / "cat" / "0.jpg").unlink()
    with pytest.raises(TrainingError, match=r"cat/0\.jpg: cannot be read: No such file or directory; check the disk"):
        data.train.fetch(np.array([0]), None)


def test_names_outside_ascii(root: Path) -> None:
    source = root / "train" / "cat"
    for each, name in enumerate(("ö 1.jpg", "日本.jpg", "\udcff.jpg")):  # the last is no UTF-8 on the disk
        (source / f"{each}.jpg").rename(source / name)
    images, _ = _open(root).train.fetch(np.arange(8), None)
    assert images.shape == (8, 3, SIZE, SIZE)


def test_a_picture_as_a_sample_of_another_kind() -> None:
    """Gray as Pillow's, to the bit, and of the size that is wanted."""
    picture = smooth_picture(5, 60, 80)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    assert torch.equal(to_sample(pixels, 1, 60, 80)[0], torch.from_numpy(np.array(picture.convert("L"))))
    assert torch.equal(to_sample(pixels, 3, 60, 80), pixels)
    resized = functional.resize(pixels.contiguous(), [20, 30], antialias=True)
    assert (to_sample(pixels, 3, 20, 30).int() - resized.int()).abs().max() <= 1
