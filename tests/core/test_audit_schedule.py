"""Every micro-batch is repeated in turn, by another rank wherever there is one."""

import pytest

from lockstep.core.audit_schedule import AuditSchedule
from lockstep.core.mesh import Mesh
from lockstep.core.order import Step


def step(number: int, samples: int = 64) -> Step:
    return Step(number, 0, 0, samples, 0, False)


def test_steps_are_due_by_their_number() -> None:
    schedule = AuditSchedule(5, Mesh(), 4)
    assert [number for number in range(12) if schedule.is_due(step(number))] == [4, 9]


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_each_rank_repeats_one_of_another_and_nobody_is_left_out(ranks: int) -> None:
    schedule = AuditSchedule(1, Mesh(replicate=ranks), 8)
    seen: dict[int, set[int]] = {rank: set() for rank in range(ranks)}
    for number in range(100):
        here = step(number)
        repeated = [index for rank in range(ranks) if (index := schedule.get_assignment(rank, here)) is not None]
        assert sorted(repeated) == sorted(schedule.get_audited_microbatch(rank, here) for rank in range(ranks))
        for rank, index in enumerate(repeated):
            own = {mine for mine, _ in schedule.mesh.get_data_rank(rank).get_microbatches(8)}
            assert index not in own
            seen[rank].add(index)
    for rank, indices in seen.items():
        assert indices | {mine for mine, _ in schedule.mesh.get_data_rank(rank).get_microbatches(8)} == set(range(8))


def test_a_rank_alone_repeats_its_own_in_turn() -> None:
    schedule = AuditSchedule(3, Mesh(), 4)
    assert [schedule.get_assignment(0, step(number)) for number in (2, 5, 8, 11, 14)] == [0, 1, 2, 3, 0]
    assert all(schedule.get_assignment(0, step(number)) is None for number in (0, 1, 3, 4))


def test_in_a_short_step_who_has_nothing_repeats_something() -> None:
    schedule = AuditSchedule(1, Mesh(replicate=4), 8)
    assert {schedule.get_assignment(rank, step(0, samples=2)) for rank in range(4)} == {0, 1}
    sharded = AuditSchedule(1, Mesh(shard=4), 8)
    assert [sharded.get_audited_microbatch(rank, step(0, samples=2)) for rank in range(4)] == [0, 1, 1, 1]
