"""The weight of a step is a sum over ranks, of one integer or of one for each name."""

from collections.abc import Sequence
from typing import Any

import pytest

from lockstep.core.order import Step
from lockstep.data.step_weight import BatchWeighting
from lockstep.errors import UsageError

STEP = Step(0, 0, 0, 4, 0, False)


def weigh(sums: list[list[int]], texts: Sequence[str] = (), own: Any = 0) -> tuple[BatchWeighting, list[Sequence[int]]]:
    """Return what weighs a batch as itself, what the ranks add up to, and what this rank adds."""
    added: list[Sequence[int]] = []

    def over_ranks(numbers: Sequence[int]) -> list[int]:
        added.append(list(numbers))
        return sums[len(added) - 1]

    return BatchWeighting(lambda batch: batch, over_ranks, lambda own: [own, *texts]), added


def test_a_single_weight_is_added_with_one_exchange_a_step() -> None:
    found, added = weigh([[9, 0], [12, 0]])
    for batch in (3, 4):
        assert found.compute_weight(batch) == batch
    assert found.add_total_weight(STEP, [3, 4]) == STEP._replace(total_weight=9)
    assert found.add_total_weight(STEP, [5]).total_weight == 12
    assert added == [[7, 0], [5, 0]]


def test_each_name_is_added_by_itself() -> None:
    found, added = weigh([[0, 2], [10, 5], [6, 0]], ["a,b"])
    weights = [{"a": 1, "b": 2}, {"a": 3, "b": 0}]
    assert [found.compute_weight(each) for each in weights] == weights
    step = found.add_total_weight(STEP, weights)
    assert (step.total_weight, step.weights) == (15, {"a": 10, "b": 5})
    assert found.add_total_weight(STEP, [{"a": 2, "b": 0}]).weights == {"a": 6, "b": 0}
    assert added == [[0, 1], [4, 2], [2, 0]]  # the names are told once


def test_a_rank_without_a_batch_learns_the_names() -> None:
    found, added = weigh([[0, 1], [10, 5]], ["a,b"])
    assert found.add_total_weight(STEP, []).weights == {"a": 10, "b": 5}
    assert added == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "weight: rank 1 returned the name a, but rank 0 returned the names a, b; return the same names on all"),
        ("-", "weight: rank 1 returned a single integer, but rank 0 returned the names a, b"),
    ],
)
def test_other_names_on_another_rank_are_refused(text: str, message: str) -> None:
    found, _ = weigh([[0, 2]], [text])
    found.compute_weight({"a": 1, "b": 2})
    with pytest.raises(UsageError, match=message):
        found.add_total_weight(STEP, [{"a": 1, "b": 2}])


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, "weight: returned the name a for a batch, but the names a, b for the first one"),
        (3, {"a": 1}, "weight: returned the name a for a batch, but a single integer for the first one"),
        ({"a": 1}, 3, "weight: returned a single integer for a batch, but the name a for the first one"),
    ],
)
def test_other_names_of_another_batch_are_refused(first: Any, second: Any, message: str) -> None:
    found, _ = weigh([])
    found.compute_weight(first)
    with pytest.raises(UsageError, match=message):
        found.compute_weight(second)
