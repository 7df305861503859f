"""Pipeline schedules: the order in which each rank runs the forward and backward passes of its stages in a step.

Stage s is on rank s mod n of n ranks. A receive waits for the sender, but a send doesn't wait for the receiver.
Therefore a schedule can't deadlock if, at any time, at least one rank has all inputs of its next action.

- naive: one micro-batch at a time passes through all stages, while the other ranks wait.
- gpipe: all forward passes, then all backward passes (Huang et al. 2019, "GPipe").
- 1f1b: from the first possible backward pass on, forward and backward passes alternate. A stage holds at most as many
  micro-batches as the number of stages from it to the end (Narayanan et al. 2019, "PipeDream"; 2021, "Efficient
  Large-Scale Language Model Training on GPU Clusters Using Megatron-LM").
- interleaved: 1f1b with several stages on each rank, in rounds of micro-batches. With n stages per rank, the idle time
  at both ends of a step is divided by n (Narayanan et al. 2021, section 2.2.2).
- zero_bubble: the backward pass is split in two. The input gradients are computed first, because the previous rank
  waits for them. The weight gradients are computed later, when the rank would be idle (Qi et al. 2023, "Zero Bubble
  Pipeline Parallelism", ZB-H1).
"""

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

from lockstep.core.order import split_range
from lockstep.errors import UsageError

Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "zero_bubble"]
Kind = Literal["forward", "backward", "backward_input", "backward_weight"]

_FORWARD_AND_BACKWARD: Final[tuple[Kind, Kind]] = ("forward", "backward")


class Action(NamedTuple):
    """A forward or backward pass of a stage. `backward` combines `backward_input` and `backward_weight`."""

    kind: Kind
    stage: int
    microbatch: int


def resolve_stages_per_rank(schedule: Schedule, stages_per_rank: int | None) -> int:
    """Return `stages_per_rank`. If it is None, return the default of the schedule."""
    return stages_per_rank or (2 if schedule == "interleaved" else 1)


def check_stages(
    strategy: str, schedule: Schedule, stages_per_rank: int, num_stages: int, cut_modules: Sequence[str]
) -> None:
    """Raise UsageError if the schedule doesn't support this number of stages per rank.

    Also raises UsageError if `cut_modules` isn't empty, but doesn't list one module for each stage except the first.
    """
    if stages_per_rank > 1 and schedule not in ("interleaved", "zero_bubble"):
        raise UsageError(
            f"strategy {strategy}: schedule {schedule} requires stages_per_rank=1, got {stages_per_rank}; use schedule "
            f"interleaved or zero_bubble, or don't set stages_per_rank"
        )
    if stages_per_rank == 1 and schedule == "interleaved":
        raise UsageError(
            f"strategy {strategy}: schedule interleaved requires stages_per_rank of 2 or more, got 1; set it to 2, or "
            f"use schedule 1f1b"
        )
    if cut_modules and len(cut_modules) != num_stages - 1:
        raise UsageError(
            f"strategy {strategy}: cut: the number of modules must be {num_stages - 1} for {num_stages} stages "
            f"({stages_per_rank} for each process of a pipeline), got {len(cut_modules)}; list the first module of "
            "each stage except the first stage, or don't set cut"
        )


def schedule_actions(
    schedule: Schedule, rank: int, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> list[Action]:
    """Return the actions of `rank` in a step, in order.

    Only the schedules `interleaved` and `zero_bubble` support several stages per rank. For each stage, actions of the
    same kind are in micro-batch order.
    """
    if schedule in ("naive", "gpipe"):
        forwards, backwards = (
            [Action(kind, rank, number) for number in range(num_microbatches)] for kind in _FORWARD_AND_BACKWARD
        )
        if schedule == "gpipe":
            return forwards + backwards
        return [action for pair in zip(forwards, backwards, strict=True) for action in pair]
    backward: Kind = "backward_input" if schedule == "zero_bubble" else "backward"
    rounds = split_range(num_microbatches, max(1, num_microbatches // num_ranks))
    forward_actions = list(_iterate_in_rounds("forward", rank, num_ranks, range(stages_per_rank), rounds))
    backward_actions = list(_iterate_in_rounds(backward, rank, num_ranks, range(stages_per_rank)[::-1], rounds))
    # The interleaved schedule warms up with two forward passes for each following rank. The inputs from the previous
    # rank then arrive at the same time as the gradients from the next rank.
    distance = (2 if schedule == "interleaved" else 1) * (num_ranks - 1 - rank)
    warm_up = min((stages_per_rank - 1) * len(rounds[0]) + distance, len(forward_actions))
    order = _alternate_actions(forward_actions, backward_actions, warm_up)
    return list(_delay_weight_gradients(order, rank) if schedule == "zero_bubble" else order)


def _iterate_in_rounds(
    action_kind: Kind, rank: int, num_ranks: int, stage_indices: range, rounds: list[range]
) -> Iterator[Action]:
    for numbers in rounds:
        for index in stage_indices:
            for number in numbers:
                yield Action(action_kind, index * num_ranks + rank, number)


def _alternate_actions(forwards: list[Action], backwards: list[Action], num_warm_up: int) -> Iterator[Action]:
    yield from forwards[:num_warm_up]
    for number, backward in enumerate(backwards):
        if num_warm_up + number < len(forwards):
            yield forwards[num_warm_up + number]
        yield backward


def _delay_weight_gradients(order: Iterator[Action], delay: int) -> Iterator[Action]:
    """Insert the `backward_weight` action of each micro-batch after `delay` more backward passes."""
    delayed: list[Action] = []
    for action in order:
        yield action
        if action.kind == "backward_input":
            delayed.append(action._replace(kind="backward_weight"))
            if len(delayed) > delay:
                yield delayed.pop(0)
    yield from delayed
