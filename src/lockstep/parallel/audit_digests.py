"""Digests of a rank's results and state, which audits compare between ranks that have the same tensors."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor

from lockstep.core.digest import Digests, TensorDigest, find_flipped_bit
from lockstep.core.shard import NamedTensors, Shard, get_local_tensor


class ComparedResult(NamedTuple):
    """A result that several ranks compare. `rows` identifies the rows of sharded tensors, and is empty otherwise."""

    kind: str
    rows: str = ""


# The digests of a rank: for each result, the digests of its tensors by name.
RankDigests = list[tuple[ComparedResult, dict[str, str]]]


@final
class DigestRecorder:
    """Records digests of tensors. Its method `record` can be a micro-batch's `record_tensor` (tasks/base.py)."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self._tensor_digests: dict[str, TensorDigest] = {}

    def record(self, name: str, tensor: Tensor) -> None:
        self._tensor_digests[name] = self._digests.make_tensor_digest(tensor)

    def get_digests(self) -> dict[str, str]:
        """Return the recorded digests by tensor name. Synchronizes with the device."""
        return {name: digest.to_text() for name, digest in self._tensor_digests.items()}


def digest_tensors(digests: Digests, kind: str, tensors: NamedTensors) -> RankDigests:
    """Return the digests of this rank's `tensors`. Unsharded tensors and rows of sharded tensors are separate results.

    A result without tensors is left out.
    """
    full_recorder, row_recorder = DigestRecorder(digests), DigestRecorder(digests)
    for name, tensor in tensors.items():
        (row_recorder if isinstance(tensor, Shard) else full_recorder).record(name, get_local_tensor(tensor))
    shards = [
        (name, tensor.chunked, tensor.first, [*tensor.tensor.shape])
        for name, tensor in tensors.items()
        if isinstance(tensor, Shard)
    ]
    findings = [
        (ComparedResult(kind), full_recorder.get_digests()),
        (ComparedResult(kind, short_hash(shards)), row_recorder.get_digests()),
    ]
    return [(subject, values) for subject, values in findings if values]


def describe_flipped_bit(
    subject: ComparedResult, names: Sequence[str], first: Mapping[str, str], second: Mapping[str, str]
) -> str:
    """Return text such as ", bit 22 of element [5, 120]" if exactly one bit of one tensor differs, or "" otherwise."""
    if len(names) != 1 or not (bit := find_flipped_bit(first.get(names[0], "0"), second.get(names[0], "0"))):
        return ""
    return f", {bit}{' of its rows' if subject.rows else ''}"


def short_hash(value: Any) -> str:
    """Return a short hash of a JSON-serializable value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
