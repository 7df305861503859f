"""Folders of classes: their order, what is passed over, and what is said of those that are wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.data.images.scan import iterate_images, scan_folder
from lockstep.data.sources import count_training_samples
from lockstep.errors import UsageError


def _touch(root: Path, *files: str) -> str:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return str(root)


def test_classes_and_files_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    root = _touch(
        tmp_path,
        "train/b/2.jpg",
        "train/b/10.jpg",
        "train/a/z.PNG",
        "train/a/deep/1.jpeg",
        "train/C/x.webp",
        "val/a/1.jpg",
        "val/b/1.jpg",
        "val/C/1.jpg",
    )
    found = scan_folder(root)
    assert found.classes == ["C", "a", "b"]
    assert [(file.removeprefix(f"{root}/train/"), number) for file, number in found.train] == [
        ("C/x.webp", 0),
        ("a/z.PNG", 1),
        ("a/deep/1.jpeg", 1),
        ("b/10.jpg", 2),
        ("b/2.jpg", 2),
    ]
    assert [number for _, number in found.validation] == [0, 1, 2]
    assert count_training_samples("folder", root, {}) == len(found.train)


def test_hidden_and_other_files_are_passed_over(tmp_path: Path) -> None:
    root = _touch(
        tmp_path,
        *("train/a/1.jpg", "train/a/._1.jpg", "train/a/notes.txt", "train/a/.cache/2.jpg"),
        *("train/.trash/3.jpg", "train/4.jpg", "val/a/5.jpg", "train/__MACOSX/a/._1.jpg", "train/a/6.gif"),
    )
    assert [*iterate_images(f"{root}/train/a")] == [f"{root}/train/a/1.jpg", f"{root}/train/a/6.gif"]
    found = scan_folder(root)
    assert [file for file, _ in found.train] == [f"{root}/train/a/1.jpg"]
    assert count_training_samples("folder", root, {}) == 1


def test_links_that_lead_back_add_nothing(tmp_path: Path) -> None:
    """Linux follows 40 links one after the other: a loop in each of two classes made 492 samples of 12."""
    root = _touch(tmp_path, *(f"{split}/{kind}/{n}.jpg" for split in ("train", "val") for kind in "ab" for n in "123"))
    for split in ("train", "val"):
        (tmp_path / split / "a" / "self").symlink_to(".")
        (tmp_path / split / "a" / "up").symlink_to("../..")
        (tmp_path / split / "b" / "deep").mkdir()
        (tmp_path / split / "b" / "deep" / "back").symlink_to("../../b")
    found = scan_folder(root)
    assert [file.removeprefix(f"{root}/train/") for file, _ in found.train] == [
        f"{k}/{n}.jpg" for k in "ab" for n in "123"
    ]
    assert len(found.validation) == 6
    assert count_training_samples("folder", root, {}) == 6


def test_a_folder_elsewhere_is_followed_once(tmp_path: Path) -> None:
    _touch(tmp_path, "disk/1.jpg", "disk/2.jpg", "train/a/own.jpg", "val/a/3.jpg")
    for name in ("first", "second"):
        (tmp_path / "train" / "a" / name).symlink_to("../../disk")
    names = [file.removeprefix(f"{tmp_path}/train/a/") for file, _ in scan_folder(str(tmp_path)).train]
    assert names == ["own.jpg", "first/1.jpg", "first/2.jpg"]


def test_a_class_that_is_a_link_to_what_it_lies_in_has_no_images(tmp_path: Path) -> None:
    root = _touch(tmp_path, "train/a/1.jpg", "val/a/1.jpg")
    for split in ("train", "val"):
        (tmp_path / split / "b").symlink_to(".")
    with pytest.raises(UsageError, match="no images in class 'b'"):
        scan_folder(root)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], r" contains no class folders; put the images of each class into its own folder"),
        (["val/a/1.jpg"], r"/train: no such folder; set .* train/<class>/ and val/<class>/, or in only <class>/"),
        (["train/a/1.jpg"], r"/val: no such folder; "),
        (["training/a/1.jpg", "valid/a/1.jpg"], r"/training contains folders and has .*; rename the splits to train"),
        (["photos/a/1.jpg", "photos/b/1.jpg"], r" contains a single folder, 'photos', but at least 2 classes"),
        (["a/1.jpg", "b/1.jpg"], r"each class in .* has a single image, .*; add images, or set .*per_class=0$"),
        (["train/1.jpg", "val/a/1.jpg"], r"/train contains no class folders"),
        (
            ["train/a/1.txt", "train/b/2", "val/a/1.jpg"],
            r"no images in the 2 class folders of .*/train; add files that end in .*\.jpeg",
        ),
        (
            ["train/a/1.jpg", "train/b/no", "val/a/1.jpg", "val/b/1.jpg"],
            r"no images in class 'b' of .*/train; add files",
        ),
        (["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg"], r"class 'b' of .*/train is missing in .*/val; "),
        (["train/a/1.jpg", "val/a/1.jpg", "val/b/1.jpg"], r"class 'b' of .*/val is missing in .*/train; "),
    ],
)
def test_says_what_is_wrong(tmp_path: Path, files: list[str], said: str) -> None:
    root = _touch(tmp_path, *files)
    with pytest.raises(UsageError, match=said):
        scan_folder(root)


def test_all_differences_at_once_and_not_too_many_names(tmp_path: Path) -> None:
    root = _touch(tmp_path, *(f"train/c{each}/1.jpg" for each in range(8)), "val/d/1.jpg", "val/e/none")
    with pytest.raises(UsageError) as caught:
        scan_folder(root)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "8 classes: 'c0', 'c1', 'c2', 'c3', 'c4' and 3 more of" in lines[0]
    assert "2 classes: 'd', 'e' of" in lines[1]
    assert "no images in class 'e' of" in lines[2]


def test_needs_no_torch() -> None:
    code = "import sys, lockstep.data.sources, lockstep.data.images.scan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_share_of_train_is_validation_s_and_stays_it_when_files_are_added(tmp_path: Path) -> None:
    root = _touch(tmp_path, *(f"train/{name}/{each}.jpg" for name in "ab" for each in range(100)))
    found = scan_folder(root, 0.2)
    parts = [{file for file, _ in part} for part in (found.train, found.validation)]
    assert not parts[0] & parts[1]
    assert 25 <= len(parts[1]) <= 55
    assert len(parts[0]) + len(parts[1]) == 200
    _touch(tmp_path, *(f"train/a/new{each}.jpg" for each in range(50)))
    again = scan_folder(root, 0.2)
    assert {file for file, _ in again.validation if "new" not in file} == parts[1]
    assert len(again.train) + len(again.validation) == 250
    more = scan_folder(root, 0.4)  # a larger share holds the smaller one
    assert parts[1] <= {file for file, _ in more.validation}
    assert scan_folder(root, 0.0).validation == []
    assert count_training_samples("folder", root, {"validation": 0.2}) == len(again.train)
    assert count_training_samples("folder", root, {"validation": "0.2"}) is None


def test_a_share_may_be_of_folders_of_classes_without_train(tmp_path: Path) -> None:
    files = [f"{kind}/{number}.jpg" for kind in "ab" for number in range(20)]
    bare, root = _touch(tmp_path / "bare", *files), _touch(tmp_path / "root", *(f"train/{each}" for each in files))
    (found, expected) = scan_folder(bare, 0.2), scan_folder(root, 0.2)
    assert found.classes == expected.classes
    for part, other in ((found.train, expected.train), (found.validation, expected.validation)):
        assert [(file.removeprefix(f"{bare}/"), n) for file, n in part] == [
            (file.removeprefix(f"{root}/train/"), n) for file, n in other
        ]


@pytest.mark.parametrize("above", ["", "train/"])
def test_a_share_of_each_class_is_validation_s(tmp_path: Path, above: str) -> None:
    counts = {"Katze klein": 30, "dog's": 14, "鸟": 5, "single": 1}
    files = [f"{above}{name}/IMG {each} (\udcff).JPG" for name, count in counts.items() for each in range(count)]
    root = _touch(tmp_path, *files)
    found = scan_folder(root, fraction_per_class=0.1) if above else scan_folder(root)
    of_class = [[number for _, number in part].count for part in (found.train, found.validation)]
    held_out = {name: of_class[1](number) for number, name in enumerate(found.classes)}
    assert held_out == {"Katze klein": 3, "dog's": 1, "鸟": 1, "single": 0}
    assert {name: of_class[0](number) + held_out[name] for number, name in enumerate(found.classes)} == counts
    assert not {file for file, _ in found.train} & {file for file, _ in found.validation}
    assert found.train == sorted(found.train, key=lambda each: (each[1], each[0]))
    # Where the root is, and how it is spelled, is nothing to the split.
    spelled = os.path.join(os.path.dirname(root), ".", os.path.basename(root), "")
    assert [*map(os.path.realpath, (file for file, _ in scan_folder(spelled, fraction_per_class=0.1).validation))] == [
        os.path.realpath(file) for file, _ in found.validation
    ]
    assert count_training_samples("folder", root, {"validation_per_class": 0.1}) == len(found.train)
    assert scan_folder(root, fraction_per_class=0.0).validation == []
    assert len(scan_folder(root, fraction_per_class=0.99).train) == 4


def test_files_that_are_no_images_are_counted(tmp_path: Path) -> None:
    root = _touch(tmp_path, *(f"{name}/{each}.jpg" for name in "ab" for each in range(3)))
    assert scan_folder(root).ignored == []
    strays = (".DS_Store", "a/Thumbs.db", "b/deep/notes.txt", "loose.jpg")
    _touch(tmp_path, *strays, ".hidden/x.txt")
    found = scan_folder(root)
    assert sorted(file.removeprefix(f"{root}/") for file in found.ignored) == sorted(strays)
    assert len(found.train) + len(found.validation) == 6


def test_a_share_needs_no_folder_and_leaves_each_class_some(tmp_path: Path) -> None:
    root = _touch(tmp_path, "train/a/1.jpg", "train/b/1.jpg")
    with pytest.raises(UsageError, match=r"set recipe\.data\.options\.validation_per_class=0\.1 to use a fraction"):
        scan_folder(root)
    with pytest.raises(UsageError, match=r"0\.99 of the 2 images .* leaves a class or the validation split without"):
        scan_folder(root, 0.99)
    _touch(tmp_path, "val/a/1.jpg")
    with pytest.raises(UsageError, match=r"validation: not supported with the folder .*/val; remove the option$"):
        scan_folder(root, 0.1)
    with pytest.raises(UsageError, match=r"validation_per_class: not supported with the folder .*/val; remove"):
        scan_folder(root, fraction_per_class=0.1)
    with pytest.raises(UsageError, match=r"validation and validation_per_class are both set; set only one"):
        scan_folder(root, 0.1, 0.1)
