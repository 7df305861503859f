"""A sample stays where a hash puts it, whatever comes or goes beside it, and a share is about that large."""

import numpy as np
import pytest

from lockstep.data.shares import is_in_share, rows_in_share, select_share


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_share_is_as_large_as_asked(share: float) -> None:
    named = np.mean([is_in_share(f"class/{number}.png", share) for number in range(4000)])
    assert named == pytest.approx(share, abs=0.03)
    assert rows_in_share(4000, share).mean() == pytest.approx(share, abs=0.03)


def test_a_larger_share_keeps_what_the_smaller_had() -> None:
    names = [f"{number}.png" for number in range(500)]
    small, large = ({name for name in names if is_in_share(name, share)} for share in (0.1, 0.3))
    assert small < large
    assert not any(is_in_share(name, 0.0) for name in names)


def test_a_share_that_is_taken_is_as_large_as_can_be() -> None:
    names = [f"{number}.png" for number in range(40)]
    assert [len(select_share(names[:count], 0.1)) for count in (0, 1, 2, 14, 16, 40)] == [0, 0, 1, 1, 2, 4]
    assert len(select_share(names, 0.999)) == 39
    assert select_share(names, 0.0) == []
    assert select_share(names[::-1], 0.2) == select_share(names, 0.2)
    assert {*select_share(names, 0.1)} < {*select_share(names, 0.2)}


def test_rows_that_come_later_move_none() -> None:
    assert np.array_equal(rows_in_share(900, 0.2)[:300], rows_in_share(300, 0.2))
    assert not rows_in_share(300, 0.0).any()
