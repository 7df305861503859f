"""What a model caches at module level while it is looked at is gone afterwards."""

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.device.cached_tensors import drop_new_tensors
from lockstep.device.meta import build_on_meta
from lockstep.models.check import check_model

_MASKS: dict[int, Tensor] = {}
_NESTED: dict[str, dict[int, tuple[Tensor, int]]] = {"masks": {}}
_LIST: list[Tensor] = []
_LAST: Tensor | None = None


def _ones(size: int) -> Tensor:
    return torch.ones(size)


@lru_cache(maxsize=8)
def bounded(size: int) -> Tensor:
    return _ones(size)


@cache
def unbounded(size: int) -> tuple[Tensor, int]:
    return _ones(size), size


def in_dict(size: int) -> Tensor:
    if size not in _MASKS:
        _MASKS[size] = _ones(size)
    return _MASKS[size]


def nested(size: int) -> Tensor:
    if size not in _NESTED["masks"]:
        _NESTED["masks"][size] = _ones(size), size
    return _NESTED["masks"][size][0]


def in_list(size: int) -> Tensor:
    if not _LIST:
        _LIST.append(_ones(size))
    return _LIST[0]


def in_variable(size: int) -> Tensor:
    global _LAST
    if _LAST is None:
        _LAST = _ones(size)
    return _LAST


def in_default(size: int, kept: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006 - the cache under test
    return kept.setdefault(size, _ones(size))


def _memoized(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    kept: dict[int, Tensor] = {}

    def call(size: int) -> Tensor:
        if size not in kept:
            kept[size] = function(size)
        return kept[size]

    return call


in_closure = _memoized(_ones)


class OfClass:
    kept: Tensor | None = None

    @classmethod
    def mask(cls, size: int) -> Tensor:
        if cls.kept is None:
            cls.kept = _ones(size)
        return cls.kept

    @staticmethod
    @cache
    def cached(size: int) -> Tensor:
        return _ones(size)


CACHES: dict[str, Callable[[int], Any]] = {
    "lru_cache": bounded,
    "cache of tuples": unbounded,
    "dict": in_dict,
    "dict in a dict": nested,
    "list": in_list,
    "variable": in_variable,
    "default": in_default,
    "closure": in_closure,
    "class variable": OfClass.mask,
    "static method": OfClass.cached,
}


def _tensor(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple) else found


@pytest.fixture(autouse=True)
def empty_caches() -> Iterator[None]:
    with drop_new_tensors():
        yield


@pytest.mark.parametrize("name", CACHES)
def test_what_a_look_caches_is_dropped(name: str) -> None:
    mask = CACHES[name]
    with drop_new_tensors(), torch.device("meta"):
        assert _tensor(mask(3)).is_meta
        assert _tensor(mask(3)) is _tensor(mask(3))
    assert not _tensor(mask(3)).is_meta


@pytest.mark.parametrize("name", ["dict", "dict in a dict", "list", "variable", "default", "closure", "class variable"])
def test_what_was_cached_before_stays(name: str) -> None:
    mask = CACHES[name]
    before = _tensor(mask(3))
    with drop_new_tensors(), torch.device("meta"):
        mask(4)
    assert _tensor(mask(3)) is before


def test_an_lru_cache_without_new_tensors_is_kept() -> None:
    before = bounded(3)
    with drop_new_tensors():
        bounded(3)
    assert bounded(3) is before


class Masked(nn.Module):
    """Builds and runs with masks that are cached by size alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", in_dict(4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * bounded(4) * self.get_buffer("table")
        return found


def test_a_model_that_caches_masks_runs_after_the_preflight() -> None:
    given = torch.ones(2, 4)
    check_model(Masked, name="masked", evaluation=(given,), training=(given,), check=lambda *_: None)
    assert build_on_meta(Masked).get_buffer("table").is_meta
    assert Masked()(given).device.type == "cpu"
