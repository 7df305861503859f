"""Tables: numbers are standardized by training, categories coded by it, and what does not fit is named."""

from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from lockstep.data.base import DataSet
from lockstep.data.request import DataRequest
from lockstep.data.sources import open_data
from lockstep.data.tables.columns import CategoricalColumn, NumericColumn, restore_column
from lockstep.errors import UsageError
from lockstep.tasks.dataset_properties import find_scale_warnings

TRAIN = "size,color,old,kind\n1,red,true,a\n2,blue,false,b\n3,red,true,a\n6,green,false,c\n"
VALIDATION = "color,size,kind,old\nred,3,c,true\npink,12,a,false\n"


def _open(root: Path, **options: object) -> DataSet:
    return open_data(DataRequest("table", str(root), options=options))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "train.csv").write_text(TRAIN)
    (tmp_path / "val.csv").write_text(VALIDATION)
    return tmp_path


def _all(data: DataSet) -> list[torch.Tensor]:
    return [tensor for split in (data.train, data.validation) for tensor in split.fetch(np.arange(len(split)), None)]


def test_numbers_and_categories_become_one_tensor(root: Path) -> None:
    data = _open(root, target="kind")
    inputs, targets, held_out, truths = _all(data)
    deviation = float(np.std([1, 2, 3, 6]))
    assert inputs[:, 0].tolist() == pytest.approx([(each - 3) / deviation for each in (1, 2, 3, 6)])
    assert inputs[:, 1:4].tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 0]]  # blue, green, red
    assert inputs[:, 4:].tolist() == [[0, 1], [1, 0], [0, 1], [1, 0]]
    assert targets.tolist() == [0, 1, 0, 2]
    assert held_out[:, 0].tolist() == pytest.approx([0, 9 / deviation])
    assert held_out[:, 1:4].tolist() == [[0, 0, 1], [0, 0, 0]]  # pink is none of training's
    assert truths.tolist() == [2, 0]
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert data.facts["classes"] == ["a", "b", "c"]
    assert data.facts["shape"] == [6]
    assert data.facts["columns"][1] == {"name": "color", "values": ["blue", "green", "red"]}
    assert data.facts["columns"][0] == {"name": "size", "mean": 3.0, "std": deviation}


def test_codes_come_beside_the_numbers(root: Path) -> None:
    inputs, targets = _open(root, target="kind", codes=True).train.fetch(np.array([3, 0]), None)
    assert inputs["numbers"].shape == (2, 1)
    assert inputs["categories"].tolist() == [[1, 0], [2, 1]]
    assert targets.tolist() == [2, 0]


def test_floats_are_regression_and_several_targets_too(tmp_path: Path) -> None:
    table = pyarrow.table({"x": [1, 2, 3], "y": [0.5, 1.5, 2.5], "z": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "points.parquet")
    data = _open(tmp_path / "points.parquet", target="y", validation=0)
    assert data.validation is None
    assert (data.facts["outputs"], list(find_scale_warnings(data.facts))) == (1, [])
    assert data.train.fetch(np.array([2]), None)[1].tolist() == [[2.5]]
    data = _open(tmp_path / "points.parquet", target=["y", "z"], validation=0)
    assert data.train.fetch(np.array([1]), None)[1].tolist() == [[1.5, 2.0]]
    assert _open(tmp_path / "points.parquet", target="z", validation=0).facts["classes"] == ["1", "2", "3"]
    assert _open(tmp_path / "points.parquet", target="z", kind="regression", validation=0).facts["outputs"] == 1
    data = _open(tmp_path / "points.parquet", target="y", validation=0, categories=["x"], ignore=["z"])
    assert data.facts["columns"] == [{"name": "x", "values": ["1", "2", "3"]}]


def test_whole_numbers_with_gaps_may_be_amounts(tmp_path: Path) -> None:
    for gap in (1, 1000):
        (tmp_path / "train.csv").write_text("x,y\n" + "".join(f"{n},{gap * (n // 12)}\n" for n in range(600)))
        data = _open(tmp_path, target="y", validation=0)
        assert len(data.facts["classes"]) == 50
        asked = (
            "target: 'y' has 50 distinct integers in 600 training rows; set recipe.data.options.kind to regression if"
        )
        assert (asked in data.question) == (gap == 1000)
    assert _open(tmp_path, target="y", validation=0, kind="classification").question == ""
    data = _open(tmp_path, target="y", validation=0, kind="regression")
    assert data.facts["outputs"] == 1
    assert data.facts["target_scale"] == [[pytest.approx(24_500), pytest.approx(14_430.87)]]
    [warning] = find_scale_warnings(data.facts)
    assert warning.startswith("target 'y' has mean 2.45e+04 and standard deviation 1.443e+04, so a model ")
    assert "; use recipe.model.name=mlp" in warning
    (tmp_path / "val.csv").write_text("x,y\n1,500\n")
    with pytest.raises(UsageError, match=r"set recipe\.data\.options\.kind to regression if they are"):
        _open(tmp_path, target="y")
    with pytest.raises(UsageError, match="validation has the class 500, which does not occur in training"):
        _open(tmp_path, target="y", kind="classification")


def test_a_share_of_the_rows_stays_validation_s_when_rows_are_added(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    parts = []
    for rows in (200, 260):
        file.write_text("x,y\n" + "".join(f"{each},{each}.5\n" for each in range(rows)))
        parts.append([set(tensor.flatten().tolist()) for tensor in _all(_open(file, target="y", validation=0.2))[1::2]])
    (train, held_out), (more, more_held_out) = parts
    assert 20 <= len(held_out) <= 60
    assert len(train) + len(held_out) == 200
    assert train <= more
    assert held_out <= more_held_out
    data = _open(file, target="y", validation=0.2)
    # Half more than the number of the row.
    targets = data.train.fetch(np.arange(len(data.train)), None)[1].flatten().tolist()
    assert [data.get_sample_name(number) for number in range(len(data.train))] == [
        f"sample {number} row {int(each)}" for number, each in enumerate(targets)
    ]


def test_a_share_is_refused_beside_a_file_for_validation(root: Path) -> None:
    for validation in (0, 0.1):
        with pytest.raises(
            UsageError, match=r"options\.validation: not supported with the validation file in .*remove it$"
        ):
            _open(root, target="kind", validation=validation)
    assert len(_open(root, target="kind").validation) == 2


def test_missing_numbers_are_refused_or_the_mean(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("x,y\n1,0\n,1\n3,0\n")
    with pytest.raises(
        UsageError, match=r"column 'x' has 1 missing or infinite values, the first in 0-based row 1; remove"
    ):
        _open(file, target="y", validation=0)
    data = _open(file, target="y", validation=0, missing="mean")
    assert data.train.fetch(np.arange(3), None)[0].flatten().tolist() == pytest.approx([-1, 0, 1])


def test_rows_are_told_by_their_numbers_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    for column, lacking in (("x", ",1.5"), ("y", "1,")):
        file.write_text("x,y\n" + "1,1.5\n" * 90 + f"{lacking}\n" + "1,1.5\n" * 9)
        with pytest.raises(UsageError, match=rf"'{column}' .*in 0-based row 90; remove"):
            _open(file, target="y", validation=0.2)


def test_lists_are_neither_inputs_nor_targets(tmp_path: Path) -> None:
    table = pyarrow.table({"x": [1.0, 2.0], "many": [[1.0], [2.0]]})
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(UsageError, match=r"column 'many' has type list<element: double>, but only numbers and text"):
        _open(tmp_path / "t.parquet", target="x", validation=0)
    with pytest.raises(UsageError, match=r"target: 'many' has type list<element: double>, but only numbers and text"):
        _open(tmp_path / "t.parquet", target="many", validation=0)


def test_codes_of_names_and_numbers_that_are_words(tmp_path: Path) -> None:
    """Half of the values or fewer are numbers, or the column is named: then it is a category."""
    file = tmp_path / "t.csv"
    file.write_text("x,z,y\n1,1,1.5\n12a,2,2.5\n13b,3b,3.5\n")
    data = _open(file, target="y", validation=0, categories=["z"])
    assert [column["values"] for column in data.facts["columns"]] == [["1", "12a", "13b"], ["1", "2", "3b"]]


def test_codes_and_lists_of_digits_are_names(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('x,y\n114 55,1.5\n020 7946 0958,2.5\n"1,2,3",3.5\n')
    [column] = _open(tmp_path / "t.csv", target="y", validation=0).facts["columns"]
    assert column["values"] == ["020 7946 0958", "1,2,3", "114 55"]


def test_what_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes("größe,y\n1,2\n".encode("latin-1"))
    with pytest.raises(UsageError, match=r"the column names of .*t\.csv are not valid UTF-8; convert the file"):
        _open(tmp_path / "t.csv", target="y")


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("x,y\n1,2\n", {}, r"options\.target: missing; set it, since it has no default"),
        ("x,y\n1,2\n", {"target": "z"}, r"no column 'z'; valid: x, y$"),
        ("x,y\n1,2\n", {"target": "y", "ignore": ["x"]}, r"has no input columns in addition to the target y; "),
        ("x,y\n1,\n1,2.5\n", {"target": "y"}, r"target: 'y' is missing in 0-based row 0; remove such rows"),
        ("x,y\n1,a\n", {"target": "y", "kind": "regression"}, r"target: 'y' has type string, and cannot be conv"),
        ("x,y,z\n1,a,2\n", {"target": ["x", "y"], "kind": "classification"}, r"2 columns, but classification"),
        ("x,y\n1,2\n", {"target": "y", "validation": 0.5}, r"options\.validation: 0\.5 of 1 rows leaves"),
        ("x,y\n", {"target": "y"}, r"has no rows"),
        ("x,y\n1,2,3\n", {"target": "y"}, r"is not a valid \.csv table: CSV parse error"),
        ("x,y\n2020-01-01,2\n", {"target": "y"}, r"column 'x' has type date32\[day\], but only numbers .*; add it"),
        ("x,y\n2,2020-01-01\n", {"target": "y"}, r"target: 'y' has type date32\[day\], but only numbers .*; set"),
        (
            "x,y\n1,2\n3,4\nn/k,2\n",
            {"target": "y"},
            r"column 'x' is mostly numeric, but has 'n/k' in 0-based row 2; remove such rows",
        ),
        (
            "x,y\n1,2\n3,4\n5,?\n",
            {"target": "y"},
            r"column 'y' is mostly numeric, but has '\?' in 0-based row 2; .*kind=classification",
        ),
        (
            'x,y\n"1,500",2\n"17,412",4\n',
            {"target": "y"},
            r"'x' is mostly numeric, but has '1,500' in 0-based row 0; write only digits",
        ),
        (
            "x,y\n1,2 €\n3,4 €\n",
            {"target": "y", "kind": "regression"},
            r"'y' is mostly numeric, but has '2 €' in 0-based row 0; write",
        ),
        (
            "x,y\n1.736.302,2\n17.412,4\n",
            {"target": "y"},
            r"'x' is mostly numeric, but has '1.736.302' in 0-based row 0; write only",
        ),
        ("x,x,y\n1,2,3\n", {"target": "y"}, r"has duplicate columns 'x'; rename them"),
        (
            "x,y\n,2\n,3\n",
            {"target": "y"},
            r"column 'x' has 2 missing or infinite values, the first in 0-based row 0; remove",
        ),
        (
            "x,y\n" + "".join(f"{n},{90_000 + n % 40}\n" for n in range(200)),
            {"target": "y"},
            r"target: 'y' has 40 distinct integers in 200 training rows; set recipe\.data\.options\.kind to regr",
        ),
        ("x,y\ninf,2\n", {"target": "y", "missing": "mean"}, r"'x' has 1 infinite values, the first in 0-based row 0"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, options: dict[str, object], said: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UsageError, match=said):
        _open(tmp_path / "t.csv", **{"validation": 0, **options})


def test_files_that_are_no_tables_are_named(root: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*absent\.csv: No such file"):
        _open(root / "absent.csv", target="y")
    with pytest.raises(UsageError, match=r"is not a \.csv or \.parquet file"):
        _open(root / "absent.xlsx", target="y")
    (root / "val.csv").write_text("size\n1\n")
    with pytest.raises(UsageError, match=r"val\.csv lacks columns of the training table: color, old, kind; add"):
        _open(root, target="kind")
    (root / "val.csv").write_text("size,color,old,kind\n1,red,true,z\n")
    with pytest.raises(UsageError, match=r"validation has the class 'z', which does not occur in training"):
        _open(root, target="kind")
    (root / "val.csv").write_text("size,color,old,kind\nbig,red,true,a\n")
    with pytest.raises(
        UsageError,
        match=r"'size' is numeric in training, but has type string here, such as 'big' in 0-based row 0; use",
    ):
        _open(root, target="kind")
    (root / "train.csv").unlink()
    with pytest.raises(UsageError, match=r"contains neither train\.csv nor train\.parquet"):
        _open(root, target="kind")


def test_columns_are_known_again_by_what_a_checkpoint_keeps() -> None:
    for column in (NumericColumn("size", 2.5, 0.5, True), CategoricalColumn("town", ("A", "B"))):
        assert restore_column(column.saved_properties, True) == column
    for strange in ({"name": "size", "mean": "2"}, {"name": "town", "values": [1]}, {}):
        with pytest.raises(UsageError, match=r"invalid column: expected .*, got "):
            restore_column(strange, False)


def test_samples_of_both_splits_are_named_by_their_row_of_the_file(tmp_path: Path) -> None:
    rows = "".join(f"{number},{number / 2}\n" for number in range(40))
    (tmp_path / "train.csv").write_text(f"x,y\n{rows}")
    data = _open(tmp_path / "train.csv", target="y", validation=0.25)
    assert data.validation is not None
    names = [data.get_sample_name(number) for number in range(len(data.train))]
    names += [data.get_validation_sample_name(number) for number in range(len(data.validation))]
    assert sorted(int(name.rpartition("row ")[2]) for name in names) == list(range(40))
    whole = np.concatenate([split.fetch(np.arange(len(split)), None)[1] for split in (data.train, data.validation)])
    assert whole.ravel().tolist() == [int(name.rpartition("row ")[2]) / 2 for name in names]
