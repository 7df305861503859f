"""What the library datasets has saved: rows as samples, its parts and its classes."""

import os
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from lockstep.data.base import DataSet
from lockstep.data.request import DataRequest
from lockstep.data.sources import open_data
from lockstep.data.validation_split import make_held_out_mask
from lockstep.errors import UsageError

_TRAINING_ROWS = int((~make_held_out_mask(100, 0.1)).sum())


def _open(root: Path, **options: object) -> DataSet:
    return open_data(DataRequest("datasets", str(root), options=options))


def _rows(count: int) -> datasets.Dataset:
    features = datasets.Features(
        {
            "x": datasets.Sequence(datasets.Value("float32"), length=2),
            "n": datasets.Value("int32"),
            "label": datasets.ClassLabel(names=["even", "odd"]),
        }
    )
    rows = {"x": [[each, each + 0.5] for each in range(count)], "n": [*range(count)], "label": [0, 1] * (count // 2)}
    return datasets.Dataset.from_dict(rows, features)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    datasets.DatasetDict({"train": _rows(10), "validation": _rows(4)}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_pair_of_one_column_and_a_class(root: Path) -> None:
    data = _open(root, inputs="x", target="label")
    assert (len(data.train), len(data.validation)) == (10, 4)
    assert data.facts == {"classes": ["even", "odd"], "shape": [2]}
    inputs, targets = data.train.fetch(np.array([3, 0]), None)
    assert inputs.tolist() == [[3.0, 3.5], [0.0, 0.5]]
    assert targets.tolist() == [1, 0]


def test_all_columns_as_a_dict_and_a_share_of_the_rows(tmp_path: Path) -> None:
    _rows(100).save_to_disk(tmp_path / "one")
    data = _open(tmp_path / "one", validation=0.2)
    assert len(data.train) + len(data.validation) == 100
    batches = [split.fetch(np.arange(len(split)), None) for split in (data.train, data.validation)]
    assert sorted(batches[0]["n"].tolist() + batches[1]["n"].tolist()) == [*range(100)]
    assert set(batches[0]) == {"x", "n", "label"}
    assert _open(tmp_path / "one", validation=0).validation is None
    two, target = _open(tmp_path / "one", inputs=["x", "n"], target="label").train.fetch(np.array([0]), None)
    assert (set(two), target.shape) == ({"x", "n"}, (1,))


def test_pictures_become_bytes(tmp_path: Path) -> None:
    pictures = [Image.new("RGB", (4, 6), (each, 0, 0)) for each in range(3)]
    rows = {"image": pictures, "label": [0, 1, 2]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=3)})
    datasets.Dataset.from_dict(rows, features).save_to_disk(tmp_path / "pictures")
    data = _open(tmp_path / "pictures", target="label", validation=0)
    assert data.facts["shape"] == [3, 6, 4]
    assert data.train.fetch(np.array([2]), None)[0][0, 0, 0, 0] == 2


def test_what_does_not_fit_is_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent: no such folder; set recipe.data.root"):
        _open(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"cannot open .*empty: "):
        _open(tmp_path / "empty")
    with pytest.raises(UsageError, match=r"has no split 'test'; valid: train, validation"):
        _open(root, held_out="test")
    with pytest.raises(UsageError, match=r"has no split 'valid'; did you mean 'validation'"):
        _open(root, held_out="valid")
    with pytest.raises(UsageError, match=r"no column 'lable'; did you mean 'label'"):
        _open(root, target="lable")


@pytest.mark.parametrize("validation", [0, 0.1])
def test_a_share_is_refused_where_there_is_a_split_for_validation(root: Path, validation: float) -> None:
    told = r"recipe\.data\.options\.validation: not supported with the split 'validation' of .*saved; remove it$"
    with pytest.raises(UsageError, match=told):
        _open(root, validation=validation)
    with pytest.raises(UsageError, match=r"not supported with the split 'train' of"):
        _open(root, train="validation", held_out="train", validation=validation)


def test_splits_are_refused_where_there_are_none(tmp_path: Path) -> None:
    _rows(4).save_to_disk(tmp_path / "one")
    for option in ("train", "held_out"):
        with pytest.raises(UsageError, match=rf"options\.{option}: .*one is a Dataset without splits; remove it$"):
            _open(tmp_path / "one", **{option: "train"})
    datasets.DatasetDict({"train": _rows(100), "test": _rows(4)}).save_to_disk(tmp_path / "two")
    data = _open(tmp_path / "two")
    assert (len(data.train), len(data.validation)) == (_TRAINING_ROWS, 100 - _TRAINING_ROWS)
    assert len(_open(tmp_path / "two", validation=0.1).train) == _TRAINING_ROWS
    with pytest.raises(UsageError, match="has no split 'validation'; valid: train, test"):
        _open(tmp_path / "two", held_out="validation")


def test_a_pipe_among_the_files_is_refused_and_not_waited_for(root: Path) -> None:
    [file] = (root / "train").glob("*.arrow")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UsageError, match=r"cannot open .*\.arrow is not a regular file"):
        _open(root)
