"""Users' own data sets: what they may return, what is said of the rest, and draws that follow from the sample."""

import random as python_random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset, TensorDataset

from lockstep.data.base import DataSet
from lockstep.data.images.digits import load_digits
from lockstep.data.images.leaves import to_tensor
from lockstep.data.imported import import_dataset
from lockstep.data.request import DataRequest
from lockstep.data.sources import open_data
from lockstep.errors import UsageError, UserCodeError

Open = Callable[..., DataSet]


class Listed:
    """A map-style data set over a list of samples, each an item or a function that makes one."""

    def __init__(self, samples: list[Any], **attributes: Any) -> None:
        self.samples = samples
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        sample = self.samples[index]
        return sample() if callable(sample) else sample


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


@pytest.fixture
def open_with(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Return `imported` for a function given as an object."""

    def opened(function: Any, options: Mapping[str, Any] | None = None, **changed: Any) -> DataSet:
        monkeypatch.setattr("lockstep.data.imported.import_object", lambda path, what: function)
        return open_data(DataRequest("mine:data", options=options or {}, **changed))

    return opened


def _bytes(value: int) -> torch.Tensor:
    return torch.full((3, 4, 5), value, dtype=torch.uint8)


def _pictures() -> Listed:
    return Listed([(_bytes(each), each % 2) for each in range(6)], classes=["even", "odd"])


def test_imports_by_path_and_passes_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_data_here.py").write_text(
        "import torch\n"
        "def data(samples, *, offset=0):\n"
        "    part = [(torch.tensor([float(each + offset)]), each) for each in range(samples)]\n"
        "    return part, part[:2]\n"
    )
    data = import_dataset("own_data_here:data", {"samples": 4, "offset": 10, "classes": 4})
    assert (len(data.train), len(data.validation)) == (4, 2)
    inputs, targets = data.train.fetch(np.array([3, 1]), None)
    assert inputs.tolist() == [[13.0], [11.0]]
    assert targets.tolist() == [3, 1]
    assert targets.dtype == torch.int64
    assert data.facts["classes"] == ["0", "1", "2", "3"]
    assert not data.train.in_memory


def test_images_of_bytes_are_scaled_to_one(open_with: Open) -> None:
    data = open_with(lambda: (_pictures(), _pictures()))
    assert data.facts["shape"] == [3, 4, 5]
    assert data.facts["mean"] == [0.0, 0.0, 0.0]
    assert data.facts["std"] == [1.0, 1.0, 1.0]
    assert data.facts["classes"] == ["even", "odd"]


def test_other_data_is_left_as_it_is(open_with: Open) -> None:
    part = TensorDataset(torch.randn(5, 7), torch.arange(5))
    data = open_with(lambda: (part, part), {"classes": ["a", "b", "c", "d", "e"]})
    assert data.facts["shape"] == [7]
    assert "mean" not in data.facts
    assert torch.equal(data.validation.fetch(np.arange(5), None)[0], part.tensors[0])


def test_a_whole_data_set_is_taken_as_it_is(open_with: Open) -> None:
    whole = load_digits()
    found = open_with(lambda: whole)
    assert found.facts == whole.facts
    assert (len(found.train), len(found.validation)) == (len(whole.train), len(whole.validation))
    assert found.train.in_memory
    indices = np.array([7, 3])
    for one, other in zip(found.train.fetch(indices, None), whole.train.fetch(indices, None), strict=True):
        assert torch.equal(one, other)


def test_no_samples_keep_their_shape(open_with: Open) -> None:
    inputs, targets = open_with(lambda: (_pictures(), _pictures())).train.fetch(np.array([], np.int64), 1)
    assert inputs.shape == (0, 3, 4, 5)
    assert inputs.dtype == torch.uint8
    assert (targets.shape, targets.dtype) == ((0,), torch.int64)


def _drawing() -> tuple[torch.Tensor, int]:
    drawn = [python_random.random(), float(np.random.rand()), float(torch.rand(()))]
    return torch.tensor(drawn, dtype=torch.float64), 0


def test_random_numbers_follow_from_draw_and_sample_alone(open_with: Open) -> None:
    part = Listed([_drawing] * 6, classes=["one"])
    split = open_with(lambda: (part, part)).train
    first, _ = split.fetch(np.arange(6), 5)
    again, _ = split.fetch(np.array([4, 2]), 5)
    assert torch.equal(again, first[[4, 2]])
    assert len(first.flatten().unique()) == 18  # no sample and no generator draws what another does
    other, _ = split.fetch(np.arange(6), 6)
    assert (other != first).all()
    assert torch.equal(split.fetch(np.arange(6), None)[0], split.fetch(np.arange(6), None)[0])


def test_the_option_classes_reaches_a_function_that_takes_it(open_with: Open) -> None:
    def with_classes(classes: int) -> Any:
        part = Listed([(_bytes(classes), 0)])
        return part, part

    data = open_with(with_classes, {"classes": 7})
    assert data.train.fetch(np.array([0]), None)[0].unique().tolist() == [7]
    assert len(data.facts["classes"]) == 7


@pytest.mark.parametrize(
    ("changed", "passed"),
    [
        ({}, {"root": "own", "download": "own"}),
        ({"root": "data", "download": True}, {"root": "own", "download": "own"}),
        ({"root": "/images"}, {"root": "/images", "download": "own"}),
        ({"root": "/images", "download": False}, {"root": "/images", "download": False}),
        ({"options": {"root": "option"}, "download": False}, {"root": "option", "download": False}),
    ],
)
def test_a_location_that_is_set_reaches_a_function_that_takes_it(
    open_with: Open, changed: dict[str, Any], passed: dict[str, Any]
) -> None:
    got = {}

    def with_location(root: str = "own", download: Any = "own") -> Any:
        got.update(root=root, download=download)
        return _part(classes=1), None

    def with_any(**keys: Any) -> Any:
        return with_location(**keys)

    for function in (with_location, with_any):
        open_with(function, **changed)
        assert got == passed


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"root": "/images"},
            r"recipe\.data\.root: your function has no parameter 'root'; remove the key and use recipe\.data\.options, "
            r"or add the parameter to the signature \(size: int = 1\) -> Any$",
        ),
        ({"download": False}, r"recipe\.data\.download: your function has no parameter 'download'; remove the key"),
        (
            {"root": "/images", "options": {"root": "/more"}},
            r"recipe\.data\.root and recipe\.data\.options\.root are both set; set only one of them$",
        ),
    ],
)
def test_a_location_that_does_not_fit(open_with: Open, changed: dict[str, Any], said: str) -> None:
    def without_location(size: int = 1) -> Any:
        return _part(classes=1), None

    with pytest.raises(UsageError, match=rf"^dataset mine:data: {said}"):
        open_with(without_location, **changed)
    open_with(without_location, root="data", download=True)


def _part(**attributes: Any) -> Listed:
    return Listed([(_bytes(0), 0)], **attributes)


def _fails() -> Any:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (7, r"^dataset mine:data: expected a function, got an object of type int; set recipe\.data\.name to a"),
        (lambda size: None, r"missing a required argument: 'size' \(.* sets nothing\); .* signature \(size\)$"),
        (_fails, r"ZeroDivisionError: division by zero \(.*test_imported\.py:\d+\); fix it there$"),
        (lambda: None, r"expected \(train, validation\) or a lockstep DataSet, got None$"),
        (lambda: _part(), r"got an object of type Listed$"),
        (lambda: (_part(), _part(), _part()), r"got a tuple of 3$"),
        (lambda: (_part(classes=1), 5), r"validation split: expected a map-style .* or None .*, got an object of"),
        (
            lambda: (Endless(), Endless()),
            r"training split: expected a map-style .* type Endless; a stream must have known shards",
        ),
        (lambda: ({}, {}), r"training split: .* integer indexing, got an object of type dict$"),
        (
            lambda: (_part(classes=1), Listed([])),
            r"the validation split has no samples; .*, or None for no validation$",
        ),
        (lambda: (Listed(["text"]), None), r"sample 0: value: expected an image, .*, got text; .* to a function$"),
        (lambda: (Listed([()]), None), r"expected a tensor, or a tuple, list or dict of tensors, got a tuple of 0$"),
        (
            lambda: (Listed([("text", 0)], classes=1), _part()),
            r"sample 0: input: expected an image, .*, got text; .*, or set recipe\.data\.collate to a function$",
        ),
        (lambda: (Listed([{"a": {"b": None}}]), None), r"sample 0: \['a'\]\['b'\]: expected .*, got None; "),
        (lambda: (_part(facts={"a": torch.ones(1)}), None), r"facts cannot be saved as JSON: Object of"),
        (lambda: (Listed([(_bytes(0), None)], classes=1), None), r"sample 0: target: expected .*, got None; convert"),
        (
            lambda: (Listed([_fails], classes=1), _part()),
            r"training sample 0: ZeroDivisionError: .*test_imported\.py:\d+\)",
        ),
    ],
)
def test_says_what_came_instead(open_with: Open, function: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_with(function)


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (
            lambda size: None,
            {"sise": 3, "size": 1},
            r"unexpected keyword argument 'sise' \(.* sets sise, size\); .* signature \(size\)$",
        ),
        (lambda: (_part(), _part()), {"classes": 0}, r"options\.classes: expected the number of classes or a list"),
    ],
)
def test_options_that_do_not_fit(open_with: Open, function: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_with(function, options)


def test_any_structure_becomes_a_batch_of_it(open_with: Open) -> None:
    samples = [
        {"image": np.full((2, 3), each, np.float32), "more": (each, [each, each + 1]), "flag": each > 1}
        for each in range(4)
    ]
    data = open_with(lambda: (Listed(samples), None))
    assert data.validation is None
    assert data.facts == {}
    assert data.skipped is None
    batch = data.train.fetch(np.array([2, 0]), None)
    assert batch["image"].shape == (2, 2, 3)
    assert batch["image"][:, 0, 0].tolist() == [2.0, 0.0]
    assert [each.tolist() for each in batch["more"]] == [[2, 0], [[2, 3], [0, 1]]]
    assert batch["flag"].tolist() == [True, False]
    empty = data.train.fetch(np.array([], np.int64), None)
    assert (empty["image"].shape, empty["more"][1].shape) == ((0, 2, 3), (0, 2))


def test_what_a_pair_without_classes_says(open_with: Open) -> None:
    pairs = Listed([(torch.ones(3), torch.tensor([0.5, 0.2]))] * 3, facts={"names": ["x", "y"]})
    assert open_with(lambda: (pairs, None)).facts == {"shape": [3], "outputs": 2, "names": ["x", "y"]}
    maps = Listed([(_bytes(0), torch.zeros(4, 5, dtype=torch.int32))] * 3, classes=["sky", "sea"])
    data = open_with(lambda: (maps, maps))
    assert data.facts["pixels"] is True
    assert data.train.fetch(np.array([0, 1]), None)[1].dtype == torch.int64


def _padded(samples: list[str]) -> Mapping[str, Any]:
    longest = max(map(len, samples))
    tokens = [[ord(each) for each in sample] + [0] * (longest - len(sample)) for sample in samples]
    return {"tokens": torch.tensor(tokens), "noise": torch.rand(len(samples))}


def test_a_collate_takes_samples_of_any_kind(open_with: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    words = Listed(["a", "abc", "ab"], collate=_padded)
    data = open_with(lambda: (words, words))
    batch = data.train.fetch(np.array([0, 2]), 5)
    assert batch["tokens"].tolist() == [[97, 0], [97, 98]]
    again = data.train.fetch(np.array([0, 2]), 5)
    assert torch.equal(batch["noise"], again["noise"])
    assert not torch.equal(batch["noise"], data.train.fetch(np.array([0, 2]), 6)["noise"])
    objects = {"mine:data": lambda: (Listed(["a", "abc"]), None), "mine:pad": _padded, "mine:no": 7}
    for place in ("data.imported", "common.importing"):
        monkeypatch.setattr(f"lockstep.{place}.import_object", lambda path, what: objects[path])
    assert import_dataset("mine:data", {}, "mine:pad").train.fetch(np.array([0, 1]), None)["tokens"].shape == (2, 3)
    with pytest.raises(
        UsageError, match=r"^collate mine:no: expected a function of samples, got an object of type int$"
    ):
        import_dataset("mine:data", {}, "mine:no")


def _made_by(name: str) -> Callable[[list[str]], Any]:
    """Return a collate function whose batches contain its name."""
    return lambda samples: {name: torch.ones(len(samples))}


@pytest.mark.parametrize(
    ("configured", "train", "validation", "used"),
    [
        ("set", "own", "other", ["set", "set"]),
        ("set", None, "other", ["set", "set"]),
        ("set", None, None, ["set", "set"]),
        (None, "own", "other", ["own", "other"]),
        (None, "own", None, ["own", "own"]),
    ],
)
def test_the_collate_of_the_recipe_comes_first(
    monkeypatch: pytest.MonkeyPatch, configured: str | None, train: str | None, validation: str | None, used: list[str]
) -> None:
    parts = [Listed(["a"], collate=name and _made_by(name)) for name in (train, validation)]
    objects = {"mine:data": lambda: parts, "mine:collate": _made_by("set")}
    for place in ("data.imported", "common.importing"):
        monkeypatch.setattr(f"lockstep.{place}.import_object", lambda path, what: objects[path])
    data = import_dataset("mine:data", {}, configured and "mine:collate")
    assert [[*split.fetch(np.array([0]), None)] for split in (data.train, data.validation)] == [[name] for name in used]


def test_a_collate_is_refused_for_a_whole_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = {"mine:data": load_digits, "mine:pad": _padded}
    for place in ("data.imported", "common.importing"):
        monkeypatch.setattr(f"lockstep.{place}.import_object", lambda path, what: objects[path])
    with pytest.raises(
        UsageError,
        match=r"^dataset mine:data: recipe\.data\.collate: mine:pad is not .* returns a DataSet, .*; remove it$",
    ):
        import_dataset("mine:data", {}, "mine:pad")


@pytest.mark.parametrize(
    ("collate", "said"),
    [
        (lambda samples: 1 // 0, r"collate of samples 0: ZeroDivisionError: .*test_imported\.py:\d+\); fix it there$"),
        (
            lambda samples: samples,
            r"collate of samples 0: expected a tensor, or a tuple, list or dict of tensors, got a",
        ),
        (lambda samples: {"a": torch.ones(3)}, r"batch\['a'\] has shape \[3\] for 1 samples; put samples along dim 0"),
        (lambda samples: (torch.ones(1), "x"), r"batch\[1\] is text; convert it to a tensor, or remove it$"),
        (lambda samples: torch.tensor(3), r"batch has shape \[\] for 1 samples"),
    ],
)
def test_a_collate_s_answer_is_looked_at(open_with: Open, collate: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_with(lambda: (Listed(["a"], collate=collate), None))


def test_samples_of_two_structures_are_named(open_with: Open) -> None:
    split = open_with(lambda: (Listed([{"a": 1}, {"a": 1, "b": 2}, {"a": [1, 2]}]), None)).train
    with pytest.raises(UsageError, match=r"sample 0 has \['a'\], but sample 1 has \['a'\], \['b'\]; return the"):
        split.fetch(np.array([0, 1]), None)
    message = r"\['a'\]: samples differ in .*: \[\] and torch.int64 \(sample 0\), \[2\] and .* that pads"
    with pytest.raises(UsageError, match=message):
        split.fetch(np.array([0, 2]), None)


def test_errors_while_training_name_the_sample(open_with: Open) -> None:
    part = Listed([(_bytes(0), 0), _fails, (_bytes(1)[:, :2], 1)], classes=2)
    split = open_with(lambda: (part, part)).train
    with pytest.raises(UserCodeError, match=r"^dataset mine:data: training sample 1: ZeroDivisionError: "):
        split.fetch(np.array([0, 1]), None)
    message = r"input: .*: \[3, 4, 5\] and torch\.uint8 \(sample 0\), \[3, 2, 5\] and torch\.uint8 \(sample 2\); "
    with pytest.raises(UsageError, match=message):
        split.fetch(np.array([0, 2]), None)


def test_an_error_meant_for_the_user_passes(open_with: Open) -> None:
    def raises() -> Any:
        raise UsageError("my own words")

    with pytest.raises(UsageError, match=r"^my own words$"):
        open_with(raises)


_GRAY = np.arange(20, dtype=np.uint8).reshape(4, 5)
_COLOR = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Image.fromarray(_GRAY), torch.from_numpy(_GRAY)[None]),
        (Image.fromarray(_COLOR), torch.from_numpy(_COLOR).permute(2, 0, 1)),
        (
            Image.fromarray(_COLOR).convert("RGBA"),
            torch.from_numpy(np.dstack([_COLOR, 0 * _GRAY + 255])).permute(2, 0, 1),
        ),
        (Image.fromarray(_GRAY).convert("P"), torch.from_numpy(_GRAY).expand(3, 4, 5)),
        (Image.fromarray(_GRAY > 9), torch.from_numpy((_GRAY > 9) * np.uint8(255))[None]),
        (_COLOR, torch.from_numpy(_COLOR).permute(2, 0, 1)),
        (_GRAY, torch.from_numpy(_GRAY)[None]),
        (_COLOR.transpose(2, 0, 1), torch.from_numpy(_COLOR).permute(2, 0, 1)),
        (_GRAY.astype(np.float64), torch.from_numpy(_GRAY).float()),
        (_GRAY.astype(np.float16), torch.from_numpy(_GRAY).half()),
        (np.int16(3), torch.tensor(3, dtype=torch.int16)),
        (3, torch.tensor(3)),
        (0.5, torch.tensor(0.5)),
        (torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)),
    ],
)
def test_values_become_tensors(value: Any, expected: torch.Tensor) -> None:
    found = to_tensor(value)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("value", ["text", None, [1, 2], {"a": 1}, np.array(["text"]), np.array([None])])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="expected"):
        to_tensor(value)
