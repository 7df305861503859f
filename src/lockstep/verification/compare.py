"""Compares what a case saw with what the reference saw, in the order in which it came about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from lockstep.verification.trace import AVERAGE, GRADIENT, MODEL, OPTIMIZER, StepTrace, Trace, Wanted

DATA: Final = "data of a micro-batch"
OWN_LOSS: Final = "loss of a micro-batch"
LOSS: Final = "loss"
NORM: Final = "norm of the gradient"
SCALARS: Final = "figures of the engine"
EVALUATION: Final = "evaluation"
NOT_THERE: Final = "not there"

Value = TypeVar("Value")


@dataclass(frozen=True)
class Difference:
    """Something that a case and the reference disagree on; `ranks` saw something else than the reference.

    `position` is that of the step in the verification, `step` its number in the run from 1 on; both None in the
    evaluation. Tensors have no values here: what was compared are their digests.
    """

    position: int | None
    step: int | None
    what: str
    name: str
    ranks: tuple[int, ...]
    reference: str = ""
    found: str = ""

    @property
    def wanted(self) -> Wanted | None:
        """What to ask for to see the values; None where they are known, or on one side alone."""
        if self.position is None or self.what not in (GRADIENT, MODEL, OPTIMIZER, AVERAGE) or self.found == NOT_THERE:
            return None
        return None if self.reference == NOT_THERE else Wanted(self.position, self.what, self.name)


def differences(reference: Trace, ranks: Sequence[Trace], first: int = 0) -> list[Difference]:
    """Return all differences, the first to come about first; the case began at position `first`."""
    found: list[Difference] = []
    for position, expected in enumerate(reference.steps[first:], first):
        found += _in_step(position, expected, {rank.rank: rank.steps[position - first] for rank in ranks})
    evaluations = {rank.rank: rank.evaluation for rank in ranks}
    found += _names(None, None, EVALUATION, reference.evaluation, evaluations)
    return found


def _in_step(position: int, expected: StepTrace, ranks: Mapping[int, StepTrace]) -> Iterator[Difference]:
    step = expected.number + 1
    owners = {rank: seen.data for rank, seen in ranks.items()}
    yield from _shared(position, step, DATA, expected.data, owners)
    yield from _shared(
        position, step, OWN_LOSS, expected.own_losses, {rank: seen.own_losses for rank, seen in ranks.items()}
    )
    yield from _each(position, step, LOSS, expected.loss, {rank: seen.loss for rank, seen in ranks.items()})
    yield from _tensors(position, expected, ranks, GRADIENT)
    yield from _each(position, step, NORM, expected.norm, {rank: seen.norm for rank, seen in ranks.items()})
    for kind in (MODEL, OPTIMIZER, AVERAGE):
        yield from _tensors(position, expected, ranks, kind)
    yield from _each(position, step, SCALARS, expected.scalars, {0: ranks[0].scalars})


def _shared(
    position: int, step: int, what: str, expected: Mapping[str, Value], ranks: Mapping[int, Mapping[str, Value]]
) -> Iterator[Difference]:
    """Compare what each micro-batch gave, wherever it was computed."""
    for index, value in expected.items():
        found = {rank: own[index] for rank, own in ranks.items() if index in own}
        wrong = tuple(rank for rank, each in found.items() if _text(each) != _text(value))
        if not found:
            yield Difference(position, step, what, index, (), _text(value), NOT_THERE)
        elif wrong:
            yield Difference(position, step, what, index, wrong, _text(value), _text(found[wrong[0]]))


def _each(position: int, step: int, what: str, expected: Value, ranks: Mapping[int, Value]) -> Iterator[Difference]:
    """Compare what all ranks must have alike."""
    wrong = tuple(rank for rank, each in ranks.items() if _text(each) != _text(expected))
    if wrong:
        yield Difference(position, step, what, "", wrong, _text(expected), _text(ranks[wrong[0]]))


def _tensors(position: int, expected: StepTrace, ranks: Mapping[int, StepTrace], kind: str) -> Iterator[Difference]:
    seen = {rank: each.tensors.get(kind, {}) for rank, each in ranks.items()}
    yield from _names(position, expected.number + 1, kind, expected.tensors.get(kind, {}), seen)


def _names(
    position: int | None,
    step: int | None,
    what: str,
    expected: Mapping[str, Value],
    ranks: Mapping[int, Mapping[str, Value]],
) -> Iterator[Difference]:
    """Compare by name; rank 0 has all names, another rank those of which it has the whole."""
    for name in [*expected, *(name for name in ranks[0] if name not in expected)]:
        value = _text(expected[name]) if name in expected else NOT_THERE
        own = {rank: _text(found[name]) for rank, found in ranks.items() if name in found}
        wrong = tuple(rank for rank, each in own.items() if each != value)
        if 0 not in own:
            yield Difference(position, step, what, name, (0,), value, NOT_THERE)
        elif wrong:
            yield Difference(position, step, what, name, wrong, value, own[wrong[0]])


def _text(value: object) -> str:
    """Write a value so that two of them are the same only if their bits are; every NaN is one value."""
    return value.hex() if isinstance(value, float) else str(value)
