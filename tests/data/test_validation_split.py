"""A sample stays where a hash puts it, whatever comes or goes beside it, and a share is about that large."""

import numpy as np
import pytest

from lockstep.data.validation_split import get_validation_fraction, is_held_out, make_held_out_mask, select_held_out


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_share_is_as_large_as_asked(share: float) -> None:
    named = np.mean([is_held_out(f"class/{number}.png", share) for number in range(4000)])
    assert named == pytest.approx(share, abs=0.03)
    assert make_held_out_mask(4000, share).mean() == pytest.approx(share, abs=0.03)


def test_a_larger_share_keeps_what_the_smaller_had() -> None:
    names = [f"{number}.png" for number in range(500)]
    small, large = ({name for name in names if is_held_out(name, share)} for share in (0.1, 0.3))
    assert small < large
    assert not any(is_held_out(name, 0.0) for name in names)


def test_a_share_that_is_taken_is_as_large_as_can_be() -> None:
    names = [f"{number}.png" for number in range(40)]
    assert [len(select_held_out(names[:count], 0.1)) for count in (0, 1, 2, 14, 16, 40)] == [0, 0, 1, 1, 2, 4]
    assert len(select_held_out(names, 0.999)) == 39
    assert select_held_out(names, 0.0) == []
    assert select_held_out(names[::-1], 0.2) == select_held_out(names, 0.2)
    assert {*select_held_out(names, 0.1)} < {*select_held_out(names, 0.2)}


def test_rows_that_come_later_move_none() -> None:
    assert np.array_equal(make_held_out_mask(900, 0.2)[:300], make_held_out_mask(300, 0.2))
    assert not make_held_out_mask(300, 0.0).any()


def test_the_share_is_a_tenth_by_default_and_nothing_beside_a_split() -> None:
    assert [get_validation_fraction("text", share) for share in (None, 0, 0.3)] == [0.1, 0, 0.3]
    assert get_validation_fraction("text", None, "val.txt") == 0
