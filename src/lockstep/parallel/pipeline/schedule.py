"""What each rank of a pipeline does in a step, in order: forwards and backwards of stages on micro-batches.

Stage s is on rank s mod ranks, so a rank with several stages sees a micro-batch several times. What a rank needs
from another it waits for, and it never waits for what it sends: any order in which some rank can always go on is legal.

- naive: one micro-batch at a time goes all the way; the other ranks wait.
- gpipe: all forwards, then all backwards (Huang et al. 2019, "GPipe").
- 1f1b: as soon as the first backward can come, one forward and one backward in turn, so that a stage holds at most as
  many micro-batches as there are stages from it to the end (Narayanan et al. 2019, "PipeDream"; 2021, "Efficient
  Large-Scale Language Model Training on GPU Clusters Using Megatron-LM").
- interleaved: the same with several stages on each rank, in rounds of micro-batches; the wait at both ends of a step is
  shorter by that factor (Narayanan et al. 2021, section 2.2.2).
- zero_bubble: backward is split: the gradient of the input, for which the rank before waits, comes first, and that of
  the weights later, where the rank would wait (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", ZB-H1).
"""

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

from lockstep.core.order import cut
from lockstep.errors import UsageError

Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "zero_bubble"]
Kind = Literal["forward", "backward", "backward_input", "backward_weight"]

_BOTH: Final[tuple[Kind, Kind]] = ("forward", "backward")


class Action(NamedTuple):
    """One piece of work: `backward` is both of the other two at once."""

    kind: Kind
    stage: int
    microbatch: int


def stages_of_each(schedule: Schedule, stages_per_rank: int | None) -> int:
    """Return how many stages each rank has, where none are asked for as many as the schedule is made for."""
    return stages_per_rank or (2 if schedule == "interleaved" else 1)


def check_stages(strategy: str, schedule: Schedule, per_rank: int, stages: int, begins: Sequence[str]) -> None:
    """Raise UsageError where the schedule is none for so many stages of each rank.

    Or where the modules that are said to begin the stages but the first, if any are, are not as many as these.
    """
    if per_rank > 1 and schedule not in ("interleaved", "zero_bubble"):
        raise UsageError(
            f"strategy {strategy}: schedule {schedule} has one stage for each process, not {per_rank}; use schedule "
            f"interleaved or zero_bubble, or leave stages_per_rank out"
        )
    if per_rank == 1 and schedule == "interleaved":
        raise UsageError(f"strategy {strategy}: interleaved needs stages_per_rank of 2 or more; else use 1f1b")
    if begins and len(begins) != stages - 1:
        raise UsageError(
            f"strategy {strategy}: cut names {len(begins)} modules, but there are {stages} stages, {per_rank} for each "
            f"process of a pipeline; name {stages - 1}, or leave cut out"
        )


def actions(schedule: Schedule, rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> list[Action]:
    """Return what `rank` does in a step of so many micro-batches; only the last two schedules take several stages.

    Of each stage, forwards come in the order of the micro-batches, and so do backwards of each kind.
    """
    if schedule in ("naive", "gpipe"):
        forwards, backwards = ([Action(kind, rank, number) for number in range(microbatches)] for kind in _BOTH)
        if schedule == "gpipe":
            return forwards + backwards
        return [action for pair in zip(forwards, backwards, strict=True) for action in pair]
    backward: Kind = "backward_input" if schedule == "zero_bubble" else "backward"
    rounds = cut(microbatches, max(1, microbatches // ranks))
    ahead = list(_in_rounds("forward", rank, ranks, range(stages_per_rank), rounds))
    back = list(_in_rounds(backward, rank, ranks, range(stages_per_rank)[::-1], rounds))
    # Two for each rank below: with several stages a rank's next forward comes from the rank before at the same time as
    # the backward from the rank behind.
    distance = (2 if schedule == "interleaved" else 1) * (ranks - 1 - rank)
    warm_up = min((stages_per_rank - 1) * len(rounds[0]) + distance, len(ahead))
    order = _alternating(ahead, back, warm_up)
    return list(_weights_later(order, rank) if schedule == "zero_bubble" else order)


def _in_rounds(kind: Kind, rank: int, ranks: int, local_tensor: range, rounds: list[range]) -> Iterator[Action]:
    for numbers in rounds:
        for place in local_tensor:
            for number in numbers:
                yield Action(kind, place * ranks + rank, number)


def _alternating(ahead: list[Action], back: list[Action], warm_up: int) -> Iterator[Action]:
    yield from ahead[:warm_up]
    for number, backward in enumerate(back):
        if warm_up + number < len(ahead):
            yield ahead[warm_up + number]
        yield backward


def _weights_later(order: Iterator[Action], delay: int) -> Iterator[Action]:
    """Put the gradient of the weights `delay` backwards after that of the input."""
    waiting: list[Action] = []
    for action in order:
        yield action
        if action.kind == "backward_input":
            waiting.append(action._replace(kind="backward_weight"))
            if len(waiting) > delay:
                yield waiting.pop(0)
    yield from waiting
