"""Compares the traces of a case with the reference trace, and lists the differing values in order of computation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from lockstep.verification import trace
from lockstep.verification.trace import DATA, KINDS, MICROBATCH_LOSS, TENSOR_KINDS, TensorRequest, Trace

EVALUATION: Final = "evaluation"
MISSING_VALUE: Final = "missing"

_MAX_WRITTEN_BYTES: Final = 512 << 20  # maximum total size of the tensors that are written in full


@dataclass(frozen=True)
class Difference:
    """A value that differs between a case and the reference. `ranks` are the ranks whose value differs.

    `position` is the index of the step in the verification, and `step` is its number in the run, counted from 1. Both
    are None for the evaluation. `reference` and `actual` are the two values as text. For a tensor, they are digests.
    """

    position: int | None
    step: int | None
    kind: str
    name: str
    ranks: tuple[int, ...]
    reference: str = ""
    actual: str = ""

    @property
    def request(self) -> TensorRequest | None:
        """The request for the differing tensor, or None if the value isn't a tensor or only one side has it."""
        if self.position is None or self.kind not in TENSOR_KINDS or MISSING_VALUE in (self.reference, self.actual):
            return None
        return TensorRequest(self.position, self.kind, self.name)


@dataclass(frozen=True)
class ValuePair:
    """The two values with the largest difference, as text, and their index in the tensor.

    `distance` is the absolute difference. It is infinite if one of the values is NaN, and None for values that can't be
    subtracted, such as digests and missing values.
    """

    index: tuple[int, ...] | None
    reference: str
    actual: str
    distance: float | None
    scale: float = 1.0  # largest magnitude in the reference


def find_differences(reference: Trace, rank_traces: Sequence[Trace], start_position: int = 0) -> list[Difference]:
    """Return the differences between a case and the reference, in order of computation.

    `rank_traces` are the traces of the case, whose first step is at position `start_position` of the reference.
    """
    differences: list[Difference] = []
    for position, expected in enumerate(reference.steps[start_position:], start_position):
        for kind in KINDS:
            observations = {
                rank_trace.rank: rank_trace.steps[position - start_position].observations.get(kind, {})
                for rank_trace in rank_traces
            }
            differences += _compare_kind(
                position, expected.number + 1, kind, expected.observations.get(kind, {}), observations
            )
    evaluations = {rank_trace.rank: rank_trace.evaluation for rank_trace in rank_traces}
    differences += _compare_kind(None, None, EVALUATION, reference.evaluation, evaluations)
    return differences


def _compare_kind(
    position: int | None,
    step: int | None,
    kind: str,
    expected: Mapping[str, str],
    observations_by_rank: Mapping[int, Mapping[str, str]],
) -> Iterator[Difference]:
    """Yield the differences between the expected values of a kind and the values that the ranks observed.

    The values of a micro-batch can be on any rank. For all other kinds, rank 0 has all values, and the other ranks have
    the values that aren't sharded.
    """
    required_ranks = () if kind in (DATA, MICROBATCH_LOSS) else (0,)
    for name in [*expected, *(name for name in observations_by_rank[0] if name not in expected)]:
        expected_value = expected.get(name, MISSING_VALUE)
        rank_values = {
            rank: observations[name] for rank, observations in observations_by_rank.items() if name in observations
        }
        differing_ranks = tuple(rank for rank, rank_value in rank_values.items() if rank_value != expected_value)
        if not rank_values or not rank_values.keys() >= {*required_ranks}:
            yield Difference(position, step, kind, name, required_ranks, expected_value, MISSING_VALUE)
        elif differing_ranks:
            yield Difference(
                position, step, kind, name, differing_ranks, expected_value, rank_values[differing_ranks[0]]
            )


def make_tensor_requests(differences: Sequence[Difference]) -> frozenset[TensorRequest]:
    """Return requests for the first differing tensor, and for as many more as fit in the size budget."""
    requests: list[TensorRequest] = []
    remaining_bytes = _MAX_WRITTEN_BYTES
    for difference in differences:
        if difference.request is not None:
            remaining_bytes -= trace.parse_num_bytes(difference.reference)
            if requests and remaining_bytes < 0:
                break
            requests.append(difference.request)
    return frozenset(requests)


def load_values(difference: Difference, reference_folder: Path, actual_folder: Path) -> ValuePair | None:
    """Return the two values of a difference, or None if the tensors weren't written, or are equal in the second run."""
    if difference.request is None:
        return _parse_metric_values(difference)
    expected = trace.load_tensor(reference_folder, 0, difference.request)
    actual = trace.load_tensor(actual_folder, difference.ranks[0], difference.request)
    return None if expected is None or actual is None else find_largest_difference(expected, actual)


def find_largest_difference(reference: Tensor, actual: Tensor) -> ValuePair | None:
    """Return the pair of elements with the largest difference, or None if all elements are equal."""
    if reference.shape != actual.shape or reference.dtype != actual.dtype:
        reference_text, actual_text = (
            f"{tensor.dtype} of shape {tuple(tensor.shape)}" for tensor in (reference, actual)
        )
        return ValuePair(None, reference_text, actual_text, None)
    reference_values, actual_values = reference.double().flatten(), actual.double().flatten()
    distance = (reference_values - actual_values).abs()
    equal = reference_values.isnan() & actual_values.isnan() | (reference_values == actual_values)
    distance = torch.where(equal, 0.0, distance.nan_to_num(math.inf, math.inf))
    if not distance.numel() or not bool(distance.max() > 0):
        return None
    position = int(distance.argmax())
    index = tuple(int(coordinate) for coordinate in torch.unravel_index(torch.tensor(position), reference.shape))
    scale = float(reference_values.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return ValuePair(
        index,
        f"{float(reference_values[position]):.9g}",
        f"{float(actual_values[position]):.9g}",
        float(distance[position]),
        scale,
    )


def compute_max_relative_distance(pairs: Sequence[tuple[Difference, ValuePair]]) -> float | None:
    """Return the largest relative difference, or None if no values can be subtracted.

    Each difference is relative to the largest magnitude among the differing values of the same kind in the same step.
    """
    scales: dict[tuple[int | None, str], float] = {}
    for difference, pair in pairs:
        key = difference.position, difference.kind
        scales[key] = max(scales.get(key, 0.0), pair.scale)
    ratios = [
        (pair.distance, scales[difference.position, difference.kind])
        for difference, pair in pairs
        if pair.distance is not None
    ]
    return max((distance / scale if scale else math.inf for distance, scale in ratios), default=None)


def _parse_metric_values(difference: Difference) -> ValuePair:
    """Return the two values of a difference that isn't in a tensor. Metrics are stored as hexadecimal floats."""
    expected, actual = _parse_float(difference.reference), _parse_float(difference.actual)
    if expected is None or actual is None:
        # Truncated, because the state of an engine can be long.
        return ValuePair(None, difference.reference[:200], difference.actual[:200], None)
    distance = abs(expected - actual)
    return ValuePair(None, repr(expected), repr(actual), math.inf if math.isnan(distance) else distance, abs(expected))


def _parse_float(text: str) -> float | None:
    is_float = text.removeprefix("-").startswith("0x") or text in ("nan", "inf", "-inf")
    return float.fromhex(text) if is_float else None
