"""What `run.steps` is asked for."""

import pytest

from lockstep.data.items import Items
from lockstep.errors import UsageError
from lockstep.run.own_plan import OwnPlan, make_plan


def plan(batch: int, microbatches: int | None, microbatch: int | None) -> OwnPlan:
    return make_plan(Items(range(100), None), batch, microbatches, microbatch, 1, None, None, False)


@pytest.mark.parametrize(
    ("batch", "microbatches", "microbatch", "count"),
    [
        (64, None, None, 8),
        (4, None, None, 4),
        (64, 2, None, 2),
        (64, None, 4, 16),
        (65, None, 4, 17),
        (64, None, 100, 1),
    ],
)
def test_micro_batches_by_their_number_or_their_size(
    batch: int, microbatches: int | None, microbatch: int | None, count: int
) -> None:
    assert plan(batch, microbatches, microbatch).microbatches == count


@pytest.mark.parametrize(("microbatches", "microbatch"), [(4, 16), (None, 0), (None, -1)])
def test_one_of_both_is_given(microbatches: int | None, microbatch: int) -> None:
    with pytest.raises(UsageError, match=f"run.steps: microbatch is {microbatch}, and microbatches {microbatches}"):
        plan(64, microbatches, microbatch)
