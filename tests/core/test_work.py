"""Each process needs a micro-batch of its own."""

import pytest

from lockstep.core.work import check_divides, check_microbatches
from lockstep.errors import UsageError


@pytest.mark.parametrize("processes", [1, 4])
def test_as_many_processes_as_micro_batches_have_work(processes: int) -> None:
    check_microbatches(processes, 4)


def test_one_more_is_refused_with_both_ways_out() -> None:
    with pytest.raises(UsageError, match=r"5 processes but only 4 .*at most 4 processes, or set recipe.microbatches=5"):
        check_microbatches(5, 4)


def test_a_second_process_for_one_micro_batch_is_told_the_number_to_set() -> None:
    with pytest.raises(UsageError, match=r"2 processes but only 1 micro-batch; .*recipe.microbatches=2, which changes"):
        check_microbatches(2, 1)


def test_what_does_not_divide_is_refused_though_it_is_smaller() -> None:
    check_divides("replicate=2", 2, 4)
    with pytest.raises(UsageError, match="replicate=3 does not divide 4 processes; use 1, 2, 4"):
        check_divides("replicate=3", 3, 4)
