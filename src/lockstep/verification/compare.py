"""Compares the traces of a case with the reference, and finds the differing values in order of computation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from lockstep.verification import trace
from lockstep.verification.trace import DATA, KINDS, OWN_LOSS, TENSOR_KINDS, TensorRequest, Trace

EVALUATION: Final = "evaluation"
MISSING_VALUE: Final = "missing"

_BUDGET_BYTES: Final = 512 << 20  # total size of the tensors that are written in full


@dataclass(frozen=True)
class Difference:
    """A value that differs between a case and the reference. `ranks` are the ranks that differ from the reference.

    `position` is the index of the step in the verification, and `step` is its number in the run, counted from 1. Both
    are None for the evaluation. For tensors, only digests are compared, so the values aren't known here.
    """

    position: int | None
    step: int | None
    what: str
    name: str
    ranks: tuple[int, ...]
    reference: str = ""
    found: str = ""

    @property
    def wanted(self) -> TensorRequest | None:
        """The tensor to request in order to get the values. None if they are known, or if only one side exists."""
        if self.position is None or self.what not in TENSOR_KINDS or MISSING_VALUE in (self.reference, self.found):
            return None
        return TensorRequest(self.position, self.what, self.name)


@dataclass(frozen=True)
class Values:
    """The two values with the largest difference.

    `distance` is infinite if one of them is NaN. It is None for values without a distance, such as data or a missing
    tensor.
    """

    index: tuple[int, ...] | None
    reference: str
    found: str
    distance: float | None
    scale: float = 1.0  # largest magnitude in the reference


def differences(reference: Trace, ranks: Sequence[Trace], first: int = 0) -> list[Difference]:
    """Return all differences in order of computation. `first` is the position at which the case started."""
    found_differences: list[Difference] = []
    for position, expected in enumerate(reference.steps[first:], first):
        for kind in KINDS:
            observations = {rank.rank: rank.steps[position - first].seen.get(kind, {}) for rank in ranks}
            found_differences += _compare_kind(
                position, expected.number + 1, kind, expected.seen.get(kind, {}), observations
            )
    evaluations = {rank.rank: rank.evaluation for rank in ranks}
    found_differences += _compare_kind(None, None, EVALUATION, reference.evaluation, evaluations)
    return found_differences


def _compare_kind(
    position: int | None,
    step: int | None,
    what: str,
    expected: Mapping[str, str],
    ranks: Mapping[int, Mapping[str, str]],
) -> Iterator[Difference]:
    """Compare values by name.

    Values of micro-batches can be on any rank. For all other kinds, rank 0 has all values, and the other ranks have the
    values that aren't sharded.
    """
    holders = () if what in (DATA, OWN_LOSS) else (0,)
    for name in [*expected, *(name for name in ranks[0] if name not in expected)]:
        value = expected.get(name, MISSING_VALUE)
        rank_values = {rank: observations[name] for rank, observations in ranks.items() if name in observations}
        different_ranks = tuple(rank for rank, rank_value in rank_values.items() if rank_value != value)
        if not rank_values or not rank_values.keys() >= {*holders}:
            yield Difference(position, step, what, name, holders, value, MISSING_VALUE)
        elif different_ranks:
            yield Difference(position, step, what, name, different_ranks, value, rank_values[different_ranks[0]])


def select_tensors(differences: Sequence[Difference]) -> frozenset[TensorRequest]:
    """Return the tensors to inspect: the first differing tensor, and more differing tensors within the size budget."""
    wanted: list[TensorRequest] = []
    room = _BUDGET_BYTES
    for difference in differences:
        if difference.wanted is not None:
            room -= trace.size_of(difference.reference)
            if wanted and room < 0:
                break
            wanted.append(difference.wanted)
    return frozenset(wanted)


def values(difference: Difference, reference: Path, found: Path) -> Values | None:
    """Return the values of a difference, or None if the tensors weren't written or are equal this time.

    `reference` and `found` are the folders of the two cases.
    """
    if difference.wanted is None:
        return _metric_values(difference)
    expected = trace.load_tensor(reference, 0, difference.wanted)
    actual = trace.load_tensor(found, difference.ranks[0], difference.wanted)
    return None if expected is None or actual is None else most_different_elements(expected, actual)


def most_different_elements(reference: Tensor, actual: Tensor) -> Values | None:
    """Return the pair of elements with the largest difference, or None if all elements are equal."""
    if reference.shape != actual.shape or reference.dtype != actual.dtype:
        reference_text, actual_text = (
            f"{tensor.dtype} of shape {tuple(tensor.shape)}" for tensor in (reference, actual)
        )
        return Values(None, reference_text, actual_text, None)
    expected, actual_values = reference.double().flatten(), actual.double().flatten()
    distance = (expected - actual_values).abs()
    equal = expected.isnan() & actual_values.isnan() | (expected == actual_values)
    distance = torch.where(equal, 0.0, distance.nan_to_num(math.inf, math.inf))
    if not distance.numel() or not bool(distance.max() > 0):
        return None
    position = int(distance.argmax())
    index = tuple(int(coordinate) for coordinate in torch.unravel_index(torch.tensor(position), reference.shape))
    scale = float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return Values(
        index,
        f"{float(expected[position]):.9g}",
        f"{float(actual_values[position]):.9g}",
        float(distance[position]),
        scale,
    )


def largest(pairs: Sequence[tuple[Difference, Values]]) -> float | None:
    """Return the largest distance, relative to the largest magnitude of the same kind in the same step.

    Returns None if no value has a distance.
    """
    scales: dict[tuple[int | None, str], float] = {}
    for difference, pair_values in pairs:
        key = difference.position, difference.what
        scales[key] = max(scales.get(key, 0.0), pair_values.scale)
    ratios = [
        (pair_values.distance, scales[key.position, key.what])
        for key, pair_values in pairs
        if pair_values.distance is not None
    ]
    return max((distance / scale if scale else math.inf for distance, scale in ratios), default=None)


def _metric_values(difference: Difference) -> Values:
    """Compare metrics, which the differences contain as hexadecimal text."""
    expected, actual = _float(difference.reference), _float(difference.found)
    if expected is None or actual is None:
        # Truncated, because the state of an engine can be long.
        return Values(None, difference.reference[:200], difference.found[:200], None)
    distance = abs(expected - actual)
    return Values(None, repr(expected), repr(actual), math.inf if math.isnan(distance) else distance, abs(expected))


def _float(text: str) -> float | None:
    number = text.removeprefix("-").startswith("0x") or text in ("nan", "inf", "-inf")
    return float.fromhex(text) if number else None
