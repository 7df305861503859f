from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from card import DEVICE, Card, OnCard, Stream

from lockstep.data.copies import DeviceCopier, prefetch


def test_on_the_cpu_nothing_is_copied() -> None:
    sent = [torch.ones(3), torch.zeros(2)]
    copies = DeviceCopier(torch.device("cpu"))
    assert copies.steps_ahead == 0
    assert copies.start_copy(sent)() is sent


def _computed(copies: DeviceCopier, count: int = 3) -> list[torch.Tensor]:
    """Send some tensors, each while the one before is computed with."""
    sums = []
    arrival = copies.start_copy([torch.full((4,), 0.0)])
    for number in range(1, count + 1):
        (here,) = arrival()
        arrival = copies.start_copy([torch.full((4,), float(number))])
        sums.append((here + 1).sum())
        del here
    return sums


def test_copies_do_not_wait_and_are_safe_to_use() -> None:
    with Card() as card:
        sums = _computed(DeviceCopier(DEVICE))
        assert not card.waits
        assert [float(each) for each in sums] == [4.0, 8.0, 12.0]
    assert not card.races


@pytest.mark.parametrize(("target", "name"), [(Stream, "wait_event"), (OnCard, "record_stream")])
def test_what_makes_them_safe_is_needed(target: Any, name: str) -> None:
    with Card() as card, patch.object(target, name, lambda *_: None):
        _computed(DeviceCopier(DEVICE))
    assert card.races


def test_memory_that_is_not_pinned_would_wait() -> None:
    with Card() as card:
        torch.ones(3).to(DEVICE, non_blocking=True)
    assert len(card.waits) == 1


def test_items_are_made_ahead_of_their_use() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(4):
            made.append(number)
            yield number

    ahead = prefetch(items(), 1)
    assert (next(ahead), made) == (0, [0, 1])
    assert (next(ahead), made) == (1, [0, 1, 2])
    assert list(ahead) == [2, 3]
    made.clear()
    assert (next(prefetch(items(), 0)), made) == (0, [0])
    assert list(prefetch(iter([7]), 1)) == [7]


def test_an_error_comes_when_its_item_would() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise ValueError("of item 1")

    ahead = prefetch(items(), 1)
    assert next(ahead) == 0
    with pytest.raises(ValueError, match="of item 1"):
        next(ahead)
