"""Who departs from what most found is wrong, and where there is no most nobody is named."""

import pytest

from lockstep.core.majority import find_minority


@pytest.mark.parametrize(
    ("opinions", "odd"),
    [
        ([], []),
        ([(0, "a")], []),
        ([(0, "a"), (1, "a")], []),
        ([(0, "a"), (1, "b")], None),
        ([(0, "a"), (1, "b"), (2, "a")], [1]),
        ([(0, "a"), (1, "a"), (2, "b"), (3, "b")], None),
        ([(0, "a"), (1, "b"), (2, "c"), (3, "c")], [0, 1]),
        ([(0, "a"), (1, "b"), (2, "c"), (3, "c"), (4, "d")], None),  # most ranks depart
        ([(0, "a"), (1, "b"), (2, "c")], None),
        ([(0, "x"), (1, "a"), (0, "a"), (1, "a")], [0]),  # a rank that contradicts itself
        ([(0, "x"), (1, "a"), (0, "y"), (1, "a")], [0]),
        ([(0, "x"), (1, "a"), (0, "x"), (1, "a")], None),  # two ranks, each repeating its own result
        ([(0, "x"), (0, "a"), (0, "a")], [0]),  # a rank alone
    ],
)
def test_who_is_odd(opinions: list[tuple[int, str]], odd: list[int] | None) -> None:
    assert find_minority(opinions) == odd
    assert find_minority(reversed(opinions)) == odd
