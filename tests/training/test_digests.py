"""Digests of steps: parts of ranks add up, whoever holds what; as many are kept as their price allows."""

import pytest
import torch
from torch import Tensor

from lockstep.comm.world import World
from lockstep.common.rank import RankInfo
from lockstep.core.digest import Digests
from lockstep.core.shard import ChunkLayout, MaybeSharded, Shard
from lockstep.training import digests
from lockstep.training.digests import Digest, StepDigests

ALONE = World(RankInfo(0, 1, 0, 1, "test"), torch.device("cpu"))
TENSORS = {"a": torch.randn(70, 1000), "b": torch.randn(5), "c": torch.randn(()), "d": torch.zeros(0)}


def total(*parts: Tensor) -> int:
    return sum(int(part) for part in parts) % 2**64


WHOLE = total(Digests().digest_model(TENSORS, TENSORS))


def rows(tensor: Tensor, first: int, last: int, primary: bool = True) -> Shard:
    return Shard(tensor[first:last], first, tensor.shape, primary)


def test_parts_of_any_size_add_up_to_the_whole() -> None:
    cuts = [(0, 1), (1, 33), (33, 33), (33, 60), (60, 70)]
    owned = ["b", "cd", "", "", ""]
    parts = [
        Digests().digest_model({**TENSORS, "a": rows(TENSORS["a"], *cut)}, names)
        for cut, names in zip(cuts, owned, strict=True)
    ]
    assert total(*parts) == WHOLE


def test_rows_that_several_ranks_hold_count_once() -> None:
    held: list[dict[str, MaybeSharded]] = [
        {"a": rows(TENSORS["a"], 0, 70)},
        {"a": rows(TENSORS["a"], 3, 9, primary=False)},
    ]
    parts = [Digests().digest_model(each, ()) for each in held]
    assert total(*parts) == total(Digests().digest_model({"a": TENSORS["a"]}, {"a"}))


def test_chunks_of_columns_add_up_to_the_whole() -> None:
    tensor, form = TENSORS["a"], ChunkLayout((70, 1000), (70, 4, 250), 1)
    arranged = form.to_rows(tensor)
    half = len(arranged) // 2
    parts = [
        Shard(part, first, tensor.shape, chunked=form)
        for part, first in ((arranged[:half], 0), (arranged[half:], half))
    ]
    assert total(*(Digests().digest_model({"a": each}, ()) for each in parts)) == total(
        Digests().digest_model({"a": tensor}, "a")
    )


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_each_element_counts_by_its_name_and_position(name: str) -> None:
    changed = {**TENSORS, name: TENSORS[name].clone()}
    changed[name].view(-1)[-1].neg_()
    assert total(Digests().digest_model(changed, changed)) != WHOLE
    renamed = {("z" if each == name else each): tensor for each, tensor in TENSORS.items()}
    assert total(Digests().digest_model(renamed, renamed)) != WHOLE


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return what the clock will show, which is read before a digest and after it."""
    shown: list[float] = []
    monkeypatch.setattr(digests.time, "perf_counter", lambda: shown.pop(0))
    return shown


@pytest.mark.parametrize(("price_s", "every"), [(0.004, 1), (0.006, 2), (0.05, 16), (1e9, 4096)])
def test_the_interval_keeps_the_price(seconds: list[float], price_s: float, every: int) -> None:
    found: list[Digest] = []
    noted: list[str] = []
    kept = StepDigests(ALONE, lambda: TENSORS, found.extend, None, noted.append)
    for step in range(1, 9):
        seconds += [step * 1.0, step * 1.0 + price_s]
        kept.add(step)
    kept.collect()
    assert [each.step for each in found] == [*range(1, 9)]
    assert kept.interval == every
    assert [f"one every {every} steps" in line for line in noted] == [True]
    for step in range(9, 41):
        kept.add(step)
    kept.add_weights(40, TENSORS)
    kept.collect()
    assert found[8:] == [
        *(Digest(step, WHOLE) for step in range(9, 41) if step % every == 0),
        Digest(40, WHOLE, is_weights=True),
    ]
