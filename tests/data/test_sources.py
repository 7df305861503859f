"""Data sets by name: each is found, and what does not fit it is refused by name."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lockstep.data.base import DataSet
from lockstep.data.request import SYNTHETIC, DataRequest
from lockstep.data.sources import SOURCES, count_training_samples, open_data
from lockstep.errors import UsageError

OF_FILES = "is only supported by the datasets folder and webdataset"
OF_SKIPPING = "is only supported by the datasets folder, webdataset and chat"
NOT_SKIPPING = sorted({*SOURCES} - {"folder", "webdataset", "chat"})


def _open(name: str, root: str = "nowhere", **asked: Any) -> DataSet:
    return open_data(DataRequest(name, root, **asked).without_download())


def test_digits() -> None:
    assert _open("digits").facts["shape"] == [1, 8, 8]
    assert _open("digits", image_size=8).facts["shape"] == [1, 8, 8]


def test_synthetic_has_its_defaults_and_options() -> None:
    data = _open("synthetic")
    assert (len(data.train), len(data.validation)) == (SYNTHETIC["samples"], SYNTHETIC["validation_samples"])
    assert len(data.train) == count_training_samples("synthetic", "", {})
    assert data.facts["shape"] == [3, 32, 32]
    assert len(data.facts["classes"]) == 10
    options = {"samples": 6, "validation_samples": 2, "classes": 3, "channels": 1}
    data = _open("synthetic", image_size=9, options=options)
    assert (len(data.train), len(data.validation), len(data.facts["classes"])) == (6, 2, 3)
    assert count_training_samples("synthetic", "", options) == 6
    assert data.facts["shape"] == [1, 9, 9]


def test_folder_has_its_defaults(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.new("RGB", (300, 260)).save(tmp_path / split / "a" / "1.png")
    root = str(tmp_path)
    assert _open("folder", root=root).facts["shape"] == [3, 224, 224]
    assert _open("folder", root=root, image_size=16, resize_size=20, resized_crop=True).facts["shape"] == [3, 16, 16]


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion_mnist"])
def test_torchvisions_sets_are_looked_for(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"^dataset {name}: missing or incomplete in .*download=true$"):
        _open(name, root=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("cifar", {}, r"no such dataset; did you mean .*'cifar10'.*\?$"),
        ("zzz", {}, r"no such dataset; valid: digits, cifar10, "),
        ("digits", {"options": {"samples": 3}}, r"options\.samples: this dataset has no options; remove it$"),
        ("synthetic", {"options": {"sample": 3}}, r"options\.sample: unknown option; did you mean 'samples'"),
        ("synthetic", {"options": {"samples": 0}}, r"options\.samples: expected an integer of at least 1, got 0$"),
        ("synthetic", {"options": {"classes": "9"}}, r"options\.classes: expected an integer .*, got '9'$"),
        ("synthetic", {"options": {"classes": True}}, r"options\.classes: expected an integer .*, got True$"),
        ("cifar10", {"image_size": 64}, r"image_size: 64 is not supported, since the images are 32x32; remove it$"),
        ("a:b", {"image_size": 64}, r"image_size: 64 is not supported, since your function sets the size; remove it$"),
        ("mnist", {"resize_size": 64}, rf"resize_size: 64 {OF_FILES}; remove it$"),
        ("cifar10", {"exif": False}, rf"exif: false {OF_FILES}; remove it$"),
        ("digits", {"resized_crop": True}, rf"resized_crop: true {OF_FILES}; remove it$"),
        ("a:b", {"on_error": "skip"}, rf"on_error: skip {OF_SKIPPING}; remove it, and catch errors in your dataset$"),
        *((name, {"on_error": "skip"}, rf"on_error: skip {OF_SKIPPING}; remove it(\n|$)") for name in NOT_SKIPPING),
        ("folder", {"resize_size": 200}, r"resize_size: 200 is smaller than image_size=224; use at least 224$"),
        ("folder", {"resized_crop_scale": (0.5, 0.1)}, r"resized_crop_scale: \[0\.5, 0\.1\] is not a range of"),
        ("folder", {"resized_crop_scale": (0.0, 1.0)}, r"resized_crop_scale: \[0\.0, 1\.0\] is not a range of"),
        ("folder", {}, r"nowhere: no such folder;"),
        ("digits", {"collate": "a:b"}, "collate: a:b is only supported by your own datasets and by datasets; remove"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=rf"^dataset {name}: (recipe\.data\.(augment\.)?)?{said}"):
        _open(name, **changed)


def test_all_that_does_not_fit_is_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        _open("digits", image_size=9, resize_size=9, resized_crop=True, options={"a": 1, "b": 2})
    assert len(str(caught.value).splitlines()) == 5


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("digits", 1437),
        ("cifar10", 50_000),
        ("cifar100", 50_000),
        ("mnist", 60_000),
        ("folder", None),
        ("package.module:data", None),
    ],
)
def test_by_name(name, samples):
    assert count_training_samples(name, "nowhere", {}) == samples
