"""The order of gathers: one for all members, whatever each of them wants. Members are threads here."""

from collections.abc import Callable, Sequence
from threading import Barrier, Thread

import pytest

from lockstep.comm.gathers import ScheduledGathers

ROOT = 4
USUAL = [ROOT, 0, 1, 2, 3]


class Member:
    """What a sharded model is to its gathers: units that are gathered or not; `issued` are its collectives."""

    def __init__(self, rank: int, group: "Group") -> None:
        self.issued: list[int] = []
        self.gathered: set[int] = set()
        self._rank, self._group = rank, group
        self.gathers = ScheduledGathers(self._ask, self.gather, self.gathered.discard, lambda: None, self._check)

    def gather(self, unit: int) -> None:
        if unit not in self.gathered:
            self.gathers.join_before(unit)
            self.issued.append(unit)
            self._group.meet()
            self.gathered.add(unit)

    def forward(self, units: Sequence[int]) -> Sequence[int]:
        self.gathers.begin("forward", USUAL)
        for unit in (ROOT, *units):
            self.gather(unit)
            assert unit in self.gathered
            self.gathered.discard(unit)
        schedule = [*self.gathers.end()]
        assert not self.gathered
        return schedule

    def _ask(self, numbers: Sequence[int]) -> Sequence[Sequence[int]]:
        return self._group.exchange(self._rank, numbers)

    def _check(self, unit: int, left: Sequence[int]) -> None:
        if unit not in left:
            raise ValueError(f"{unit} is not in {list(left)}")


class Group:
    """Members that wait for each other in exchanges; one that waits alone for a second raises."""

    def __init__(self, size: int) -> None:
        self._barrier = Barrier(size, timeout=1.0)
        self._given: list[Sequence[int]] = [()] * size

    def meet(self) -> None:
        self._barrier.wait()

    def exchange(self, rank: int, numbers: Sequence[int]) -> list[Sequence[int]]:
        self._given[rank] = numbers
        self._barrier.wait()
        given = [*self._given]
        self._barrier.wait()
        return given


def of_each(size: int, body: Callable[[Member, int], None]) -> list[Member]:
    group = Group(size)
    members = [Member(rank, group) for rank in range(size)]
    failed: list[Exception] = []

    def run(rank: int) -> None:
        try:
            body(members[rank], rank)
        except Exception as error:
            failed.append(error)
            group._barrier.abort()

    threads = [Thread(target=run, args=(rank,)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if failed:
        raise failed[0]
    return members


# In each forward, what each member calls; the third does as the first.
WAYS = {
    "all alike": [[(0, 1, 2, 3)] * 3] * 2,
    "left out": [[(0, 2), (1, 3), (0, 1, 2, 3)], [(3,), (), (2,)], [(), (), ()]],
    "in another order": [[(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3)], [(1, 0), (3,), (2, 1)]],
    "twice": [[(0, 1, 1, 2), (0, 1, 1), (1, 2, 1)], [(1, 1, 3)] * 3],
}


@pytest.mark.parametrize("way", WAYS)
def test_members_gather_the_same_units_in_the_same_order(way):
    schedules: dict[int, list[Sequence[int]]] = {}

    def body(member, rank):
        schedules[rank] = [member.forward(each[rank % len(each)]) for each in WAYS[way]]

    first, *others = of_each(3, body)
    assert all(each.issued == first.issued for each in others)
    assert all(sorted({*each}) == sorted(USUAL) for each in schedules[0])
    assert schedules[0] == schedules[1] == schedules[2]


def test_what_nobody_wanted_has_its_usual_place():
    found = {}

    def body(member, rank):
        found[rank] = [member.forward([1]), member.forward([0, 1, 2, 3])]

    of_each(2, body)
    assert found[0] == [USUAL, USUAL]


def test_a_unit_that_no_other_will_gather_is_refused():
    def body(member, rank):
        member.forward([0, 1])
        member.forward([0, 1, 0] if rank else [0, 1])

    with pytest.raises(ValueError, match=r"0 is not in \[2, 3\]"):
        of_each(2, body)
