"""An epoch has of each source what its weight asks for, and which samples these are follows from epoch and number."""

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lockstep.core import random
from lockstep.data.base import DataSet
from lockstep.data.mixture import Mixture, iterate_sources, split_by_weight
from lockstep.data.request import DataRequest
from lockstep.data.sources import open_data
from lockstep.errors import UsageError


class Numbers:
    """A source whose samples are its number and theirs, and the draw that they were fetched with."""

    in_memory = True

    def __init__(self, source: int, length: int) -> None:
        self._source, self._length = source, length

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> dict[str, torch.Tensor]:
        rows = torch.from_numpy(indices)
        drawn = torch.full_like(rows, 0 if draw is None else draw >> 1)
        return {"source": torch.full_like(rows, self._source), "row": rows, "draw": drawn}


LARGE, SMALL = Numbers(0, 6000), Numbers(1, 40)
EPOCH = Mixture([LARGE, SMALL], [300, 100])


def samples(mixture: Mixture, indices: NDArray[np.int64], epoch: int | None) -> list[tuple[int, ...]]:
    """Return (source, row, draw) of each."""
    found = mixture.fetch(indices, None if epoch is None else random.make_key(random.AUGMENT, 0, epoch))
    return [*zip(*(found[key].tolist() for key in ("source", "row", "draw")), strict=True)]


def rows(epoch: int, source: int) -> list[int]:
    return [row for which, row, _ in samples(EPOCH, np.arange(400), epoch) if which == source]


def test_shares_are_those_of_the_weights_to_the_sample() -> None:
    assert split_by_weight(1_000_000, [3, 1]) == [750_000, 250_000]
    assert split_by_weight(10, [1, 1, 1]) == [3, 4, 3]
    assert split_by_weight(7, [0.1, 0.2, 0.4]) == [1, 2, 4]
    for total in range(50):
        assert sum(split_by_weight(total, [0.3, 1, 2.7])) == total


def test_of_a_large_source_none_comes_twice_and_each_epoch_has_others() -> None:
    first, second = rows(0, 0), rows(1, 0)
    assert len(first) == len({*first}) == len({*second}) == 300
    assert len({*first} & {*second}) < 60  # 15 by chance
    assert max(first) > 5000  # of all of it, not of its beginning
    assert min(first) < 1000


def test_of_a_small_source_all_come_as_often_as_they_fit() -> None:
    found = Counter(rows(0, 1))
    assert len(found) == 40
    assert {*found.values()} == {2, 3}
    assert rows(0, 1)[:40] != rows(0, 1)[40:80]  # in another order
    assert {row for row, count in found.items() if count == 3} != {
        row for row, count in Counter(rows(1, 1)).items() if count == 3
    }


def test_a_sample_that_comes_again_is_drawn_anew() -> None:
    drawn = {(row, draw) for source, row, draw in samples(EPOCH, np.arange(400), 0) if source}
    assert len(drawn) == 100


def test_a_number_is_one_sample_in_whatever_batch_it_comes() -> None:
    order = np.random.default_rng(0).permutation(400)
    whole = samples(EPOCH, order, 3)
    assert [*samples(EPOCH, order[:37], 3), *samples(EPOCH, order[37:], 3)] == whole
    assert [samples(EPOCH, order[at : at + 1], 3)[0] for at in range(400)] == whole
    assert [source for source, *_ in whole] == [EPOCH.get_source_index(number) for number in order.tolist()]


def test_without_a_draw_all_are_in_their_order() -> None:
    validation = Mixture([LARGE, SMALL], [len(LARGE), len(SMALL)])
    found = samples(validation, np.arange(len(validation)), None)
    assert [each[:2] for each in found] == [*((0, row) for row in range(6000)), *((1, row) for row in range(40))]


def test_sources_that_do_not_fit_in_one_batch_are_refused() -> None:
    class Pairs(Numbers):
        def fetch(self, indices: NDArray[np.int64], draw: int | None) -> dict[str, torch.Tensor]:
            return {key: each[:, None] for key, each in super().fetch(indices, draw).items()}

    with pytest.raises(UsageError, match=r"^dataset mixture: cannot combine samples of its sources in one batch: "):
        Mixture([SMALL, Pairs(1, 40)], [5, 5]).fetch(np.arange(10), None)


TEXT = {"name": "text", "options": {"context": 16, "by": "byte"}}


def opened(tmp_path: Path, **sources: object) -> None:
    (tmp_path / "a.txt").write_text("a quick brown fox " * 40)
    open_data(DataRequest("mixture", str(tmp_path), options={"of": sources}))


def test_facts_and_parts_are_those_of_its_sources(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a quick brown fox " * 40)
    both = {"one": TEXT, "two": {**TEXT, "weight": 2.0}}
    found = open_data(DataRequest("mixture", str(tmp_path), options={"of": both, "samples": 90}))
    alone = open_data(DataRequest("text", str(tmp_path), options=TEXT["options"]))  # type: ignore[arg-type]
    assert found.facts == alone.facts
    assert len(found.train) == 90
    assert found.validation is not None
    assert alone.validation is not None
    assert len(found.validation) == 2 * len(alone.validation)
    assert [found.get_sample_name(number) for number in (0, 29, 30)] == [
        "sample 0 of one",
        "sample 29 of one",
        "sample 30 of two",
    ]
    left_out = open_data(DataRequest("mixture", str(tmp_path), options={"of": both}))
    assert len(left_out.train) == 2 * len(alone.train)


OF_B = r"recipe\.data\.options\.of\.b"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({**TEXT, "weight": 0}, rf"{OF_B}\.weight: expected a number greater than 0 and at most 1e12, got 0"),
        ({**TEXT, "weight": 1e308}, r"expected a number greater than 0 and at most 1e12, got 1e\+308"),
        ({**TEXT, "weight": 1e-9}, r"b has no samples in an epoch of 80 samples; increase recipe\.data\.options\.of"),
        ({"name": "text", "options": {"contxt": 8}}, r"of\.b: dataset text: recipe\.data\.options\.contxt: unknown"),
        ({**TEXT, "weight": "much"}, rf"{OF_B}\.weight: expected a number greater than 0 and at most 1e12, got 'much'"),
        ({"nam": "text"}, rf"{OF_B}\.nam: unknown option; did you mean 'name'\?"),
        ({"weight": 1}, rf"{OF_B}\.name: missing"),
        ({**TEXT, "options": {"context": 8, "by": "byte"}}, r"b and a differ in context; "),
        ({"name": "folder"}, r"of\.b: folder is not supported, since a mixture does not change the size of samples"),
        ({"name": "txt"}, r"dataset txt: no such dataset; did you mean 'text'\?"),
    ],
)
def test_what_cannot_be_mixed_is_refused(tmp_path: Path, source: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        opened(tmp_path, a=TEXT, b=source)


class Keyed:
    """A source of mappings, whose values say by which key they are found."""

    in_memory = True

    def __init__(self, keys: str, dtype: torch.dtype = torch.int64) -> None:
        self._keys, self._dtype = keys, dtype

    def __len__(self) -> int:
        return 8

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> dict[str, torch.Tensor]:
        return {key: torch.full((len(indices),), ord(key), dtype=self._dtype) for key in self._keys}


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_sources")
    for name, made in {
        "ab": Keyed("ab"),
        "ba": Keyed("ba"),
        "ac": Keyed("ac"),
        "doubles": Keyed("ab", torch.float64),
    }.items():
        setattr(module, name, partial(DataSet, made, None))
    module.skipping = partial(DataSet, Keyed("ab"), None, skipped=lambda batch: batch["a"] > 0)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_sources", module)


def mixed(*names: str) -> DataSet:
    sources = {name: {"name": f"own_sources:{name}"} for name in names}
    return open_data(DataRequest("mixture", options={"of": sources}))


@pytest.mark.usefixtures("own")
def test_values_of_a_sample_are_found_by_their_keys() -> None:
    found = mixed("ab", "ba").train.fetch(np.arange(16), None)
    assert {key: {*each.tolist()} for key, each in found.items()} == {"a": {ord("a")}, "b": {ord("b")}}


@pytest.mark.usefixtures("own")
def test_an_own_source_has_its_own_root_and_not_that_of_the_mixture() -> None:
    source: dict[str, object] = {"name": "own_sources:ab"}
    open_data(DataRequest("mixture", "/mixed", download=False, options={"of": {"b": source}}))
    with pytest.raises(UsageError, match=rf"{OF_B}: dataset own_sources:ab: recipe\.data\.root: your function has no"):
        open_data(DataRequest("mixture", options={"of": {"b": {**source, "root": "/own"}}}))


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("other", "told"),
    [
        ("ac", r"ac and ab differ in the dtypes of a sample, "),
        ("doubles", r"doubles and ab differ in the dtypes of a sample, .*float64.* and .*int64"),
    ],
)
def test_samples_of_another_kind_are_refused(other: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        mixed("ab", other)


@pytest.mark.usefixtures("own")
def test_what_a_source_skips_counts_as_skipped() -> None:
    found = mixed("ab", "skipping")
    assert found.skipped is not None
    assert found.skipped(found.train.fetch(np.arange(16), None)).tolist() == [True] * 16


def test_its_parts_are_whole_whatever_an_epoch_has_of_them() -> None:
    assert [len(each) for each in iterate_sources(Mixture([EPOCH, SMALL], [1, 1]))] == [6000, 40, 40]


def test_a_mixture_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"options\.of: expected a mapping of names to datasets, got \{\}"):
        opened(tmp_path)
