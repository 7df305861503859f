"""Digests of what ranks compute and keep, by what it is, so that ranks which hold the same can be compared."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor

from lockstep.core.digest import Digests, Noted, differing_bit
from lockstep.core.shard import NamedTensors, Shard, local_tensor


class Subject(NamedTuple):
    """What several ranks can have an opinion of. `rows` tells shards apart: whoever holds the same has the same."""

    kind: str
    rows: str = ""


Findings = list[tuple[Subject, dict[str, str]]]  # of a rank, with a digest for each name


@final
class DigestNotes:
    """What a `note` (tasks/base.py) has seen, as digests."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self._seen: dict[str, Noted] = {}

    def note(self, name: str, tensor: Tensor) -> None:
        self._seen[name] = self._digests.noted(tensor)

    def values(self) -> dict[str, str]:
        """Return the digest of each; waits for the device."""
        return {name: noted.text() for name, noted in self._seen.items()}


def tensor_findings(digests: Digests, kind: str, tensors: NamedTensors) -> Findings:
    """Return the digests of what is whole on this rank, and of its rows of what is cut."""
    whole, rows = DigestNotes(digests), DigestNotes(digests)
    for name, held in tensors.items():
        (rows if isinstance(held, Shard) else whole).note(name, local_tensor(held))
    cut = [
        (name, held.chunked, held.first, [*held.tensor.shape])
        for name, held in tensors.items()
        if isinstance(held, Shard)
    ]
    found = [(Subject(kind), whole.values()), (Subject(kind, hash_of(cut)), rows.values())]
    return [(subject, values) for subject, values in found if values]


def which_bit(subject: Subject, names: Sequence[str], one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return ", bit 22 of element [5, 120]" where two findings differ by one bit, of the only tensor named, else ""."""
    if len(names) != 1 or not (bit := differing_bit(one.get(names[0], "0"), other.get(names[0], "0"))):
        return ""
    return f", {bit}{' of its rows' if subject.rows else ''}"


def hash_of(value: Any) -> str:
    """Return a short hash of what JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
