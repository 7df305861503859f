"""A process's place is a value: it cannot be changed, and two of the same are equal."""

from dataclasses import FrozenInstanceError

import pytest

from lockstep.core.rank import RankInfo


def test_places_are_values() -> None:
    place = RankInfo(1, 2, 1, 2, "torchrun")
    assert place == RankInfo(1, 2, 1, 2, "torchrun", master=None, port=None)
    with pytest.raises(FrozenInstanceError):
        place.rank = 0  # type: ignore[misc]
