"""Numbers of training samples, known without reading one."""

import pytest

from lockstep.data.sizes import training_samples


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("digits", 1437),
        ("cifar10", 50_000),
        ("cifar100", 50_000),
        ("mnist", 60_000),
        ("package.module:data", None),
    ],
)
def test_by_name(name, samples):
    assert training_samples(name, "nowhere", {}) == samples


def test_synthetic_says_it_itself():
    assert training_samples("synthetic", "", {"samples": 300}) == 300


def test_a_folder_is_counted_by_its_images(tmp_path):
    for file in (
        "train/a/1.JPEG",
        "train/a/deep/2.png",
        "train/b/3.jpg",
        "train/b/notes.txt",
        "train/4.jpg",
        "val/a/5.jpg",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert training_samples("folder", str(tmp_path), {}) == 3


def test_a_folder_that_is_not_there_is_not_known(tmp_path):
    assert training_samples("folder", str(tmp_path / "nothing"), {}) is None
