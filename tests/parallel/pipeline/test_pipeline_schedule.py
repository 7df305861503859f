"""Every schedule comes to its end, does everything once and in order, and is the one that torch knows by its name."""

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from lockstep.parallel.pipeline.schedule import Action, Schedule, schedule_actions

KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


def all_actions(schedule: Schedule, ranks: int, each: int, microbatches: int) -> list[list[Action]]:
    return [schedule_actions(schedule, rank, ranks, each, microbatches) for rank in range(ranks)]


def played(plans: list[list[Action]], stages: int) -> tuple[list[list[Action]], int]:
    """Play the plans, one unit of time for an action: return what each rank did, and the time it took."""
    done: dict[Action, int] = {}
    places = [0] * len(plans)
    time = 0
    while any(place < len(plan) for place, plan in zip(places, plans, strict=True)):
        ready = []
        for rank, plan in enumerate(plans):
            if places[rank] < len(plan) and all(
                done.get(each, time) < time for each in _before(plan[places[rank]], stages)
            ):
                ready.append(rank)
        if not ready:
            break
        for rank in ready:
            done[plans[rank][places[rank]]] = time
            places[rank] += 1
        time += 1
    return [plan[:place] for place, plan in zip(places, plans, strict=True)], time


def _before(action: Action, stages: int) -> list[Action]:
    kind, stage, _ = action
    if kind == "forward":
        return [action._replace(stage=stage - 1)] if stage else []
    if kind == "backward_weight":
        return [action._replace(kind="backward_input")]
    behind = [action._replace(stage=stage + 1)] if stage + 1 < stages else []
    return [action._replace(kind="forward"), *behind]


@given(
    schedule=st.sampled_from(get_args(Schedule)),
    ranks=st.integers(1, 6),
    each=st.integers(1, 4),
    microbatches=st.integers(0, 14),
)
def test_every_schedule_comes_to_its_end_and_does_everything_once(
    schedule: Schedule, ranks: int, each: int, microbatches: int
) -> None:
    if schedule not in ("interleaved", "zero_bubble"):
        each = 1
    plans = all_actions(schedule, ranks, each, microbatches)
    assert played(plans, ranks * each)[0] == plans
    back = ["backward_input", "backward_weight"] if schedule == "zero_bubble" else ["backward"]
    expected = {
        Action(kind, stage, number)  # type: ignore[arg-type]
        for kind in ["forward", *back]
        for stage in range(ranks * each)
        for number in range(microbatches)
    }
    flat = [action for plan in plans for action in plan]
    assert len(flat) == len(expected)
    assert set(flat) == expected
    for rank, plan in enumerate(plans):
        assert {action.stage % ranks for action in plan} <= {rank}
        for kind in ["forward", *back]:
            for stage in range(rank, ranks * each, ranks):
                numbers = [number for one, of, number in plan if (one, of) == (kind, stage)]
                assert numbers == list(range(microbatches))


def torchs(schedule: Schedule, ranks: int, each: int, microbatches: int) -> list[list[Action]]:
    """Return torch's own table, made without its stages and their process group."""
    kinds: dict[Schedule, Any] = {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    }
    made = kinds[schedule].__new__(kinds[schedule])
    made._n_microbatches, made._num_stages = microbatches, ranks * each
    if schedule in ("gpipe", "1f1b"):
        table = made._get_pipeline_order()
    else:
        made.pp_group_size, made.n_local_stages = ranks, each
        made.number_of_rounds = max(1, microbatches // ranks)
        made.microbatches_per_round = microbatches // made.number_of_rounds
        table = {rank: made._calculate_single_rank_operations(rank) for rank in range(ranks)}
    return [
        [
            Action(KINDS[each.computation_type.value], each.stage_index, each.microbatch_index)  # type: ignore[arg-type]
            for each in table[rank]
            if each is not None and each.computation_type.value in KINDS
        ]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("schedule", "ranks", "each", "microbatches"),
    [
        *[(name, ranks, 1, count) for name in ("gpipe", "1f1b") for ranks, count in ((1, 3), (2, 2), (4, 4), (4, 9))],
        *[
            (name, ranks, each, count)
            for name in ("interleaved", "zero_bubble")
            for ranks, each, count in ((1, 2, 3), (2, 2, 2), (2, 2, 8), (2, 3, 4), (3, 2, 3), (4, 2, 8), (4, 2, 6))
        ],
        ("zero_bubble", 4, 1, 8),
    ],
)
def test_the_order_is_torchs(schedule: Schedule, ranks: int, each: int, microbatches: int) -> None:
    ours, theirs = all_actions(schedule, ranks, each, microbatches), torchs(schedule, ranks, each, microbatches)
    if schedule == "1f1b":  # torch 2.15 lets its last rank begin with micro-batch 1, in the table but not in its loop
        *ours, last = ours
        *theirs, _ = theirs
        assert last == [Action(kind, ranks - 1, m) for m in range(microbatches) for kind in ("forward", "backward")]
    assert ours == theirs


def test_one_forward_one_backward_holds_few_micro_batches() -> None:
    for rank, plan in enumerate(all_actions("1f1b", 4, 1, 12)):
        held = [sum(1 if one.kind == "forward" else -1 for one in plan[:count]) for count in range(len(plan) + 1)]
        assert max(held) == 4 - rank


@pytest.mark.parametrize(
    ("schedule", "each", "length"),
    [
        ("naive", 1, 8 * 2 * 4),
        ("gpipe", 1, 2 * (8 + 3)),
        ("1f1b", 1, 2 * (8 + 3)),
        ("interleaved", 2, 2 * 2 * 8 + 2 * 3),  # of half the size: the wait is half as long
        ("zero_bubble", 1, 3 * 8 + 3),
    ],
)
def test_how_long_the_ranks_wait(schedule: Schedule, each: int, length: int) -> None:
    """Units of time: a forward or (half of) a backward is one."""
    assert played(all_actions(schedule, 4, each, 8), 4 * each)[1] == length
