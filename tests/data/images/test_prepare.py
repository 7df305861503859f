"""Archives of pixels: every sample is, bit for bit, what the pictures themselves give."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data.base import DataSet
from lockstep.data.images import prepare
from lockstep.data.images.lazy_images import ImageSplit
from lockstep.data.images.prepare import write_archives
from lockstep.data.request import DataRequest
from lockstep.data.sources import open_data
from lockstep.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder of two classes with pictures of each kind, and names that are no names of members."""
    noise = np.random.default_rng(0)
    turned = Image.Exif()
    turned[0x0112] = 6
    for kind in ("a rose", "b.tulip"):
        folder = tmp_path / "pictures" / "train" / kind
        folder.mkdir(parents=True)
        for mode, name in (
            ("RGB", "1.2.jpg"),
            ("L", "1.3.jpg"),
            ("RGBA", "ü\n.png"),
            ("P", "p.png"),
            ("CMYK", "c.jpg"),
        ):
            picture = Image.fromarray(noise.integers(0, 256, (20, 31, 3), np.uint8)).resize((62, 40))
            picture.convert(mode).save(folder / name, **({"exif": turned} if mode == "L" else {}))
    return tmp_path / "pictures"


def opened(name: str, root: Path, **given: object) -> DataSet:
    options = {"validation": 0.0}
    return open_data(DataRequest(name, str(root), image_size=16, resize_size=20, options=options, **given))


def prepared(data: DataSet, root: Path, short_side: int | None = None) -> Path:
    archives = root.parent / "archives"
    archives.mkdir()
    assert isinstance(data.train, ImageSplit)
    assert [*write_archives(data.train, archives, "train", short_side)] == [*range(1, len(data.train) + 1)]
    return archives


@pytest.mark.parametrize("draw", [None, 5])
def test_a_sample_is_that_of_the_pictures(root: Path, monkeypatch: pytest.MonkeyPatch, draw: int | None) -> None:
    monkeypatch.setattr(prepare, "ARCHIVE_BYTES", 20_000)
    before = opened("folder", root, resized_crop=True)
    archives = prepared(before, root)
    assert len([*archives.iterdir()]) > 2
    after = opened("webdataset", archives, resized_crop=True)
    numbers = np.random.default_rng(0).permutation(10)
    for ours, theirs in zip(after.train.fetch(numbers, draw), before.train.fetch(numbers, draw), strict=True):
        assert torch.equal(ours, theirs)


def test_a_picture_is_found_by_its_name(root: Path) -> None:
    data = opened("folder", root)
    archives = prepared(data, root)
    after = opened("webdataset", archives)
    assert [after.files[0](0), after.files[0](4)] == [
        f"{archives / 'train-00000.tar'}: 00000000 1_2",
        f"{archives / 'train-00000.tar'}: 00000004 ü_",
    ]


def test_larger_pictures_shrink_to_a_short_side(root: Path) -> None:
    archives = prepared(opened("folder", root), root, 24)
    split = opened("webdataset", archives).train
    assert isinstance(split, ImageSplit)
    assert [split.load_image(each).shape for each in (0, 1)] == [(3, 24, 37), (3, 37, 24)]


def test_what_cannot_be_decoded_is_named_or_skipped_again(root: Path) -> None:
    (root / "train" / "a rose" / "1.2.jpg").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"1\.2\.jpg: cannot be read as an image"):
        prepared(opened("folder", root), root)
    (root.parent / "archives" / "train-00000.tar").unlink(missing_ok=True)
    (root.parent / "archives").rmdir()
    archives = prepared(opened("folder", root, on_error="skip"), root)
    after = opened("webdataset", archives, on_error="skip")
    batch = after.train.fetch(np.arange(3), None)
    assert after.skipped is not None
    assert after.skipped(batch).tolist() == [True, False, False]
