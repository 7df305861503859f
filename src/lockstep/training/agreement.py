"""Compares weights and buffers across ranks, and identifies the rank that differs.

Unsharded tensors must be equal on all ranks. Sharded tensors must be equal on all ranks that hold the same rows. In the
common case, each rank only sends two digests. If the digests differ, the ranks compare each tensor separately.
"""

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import Final

from torch import nn

from lockstep.comm.world import World
from lockstep.common.patterns import list_some
from lockstep.core.majority import find_minority
from lockstep.core.shard import MaybeSharded, NamedTensors, Shard, get_local_tensor, get_unsharded_tensors
from lockstep.errors import UsageError
from lockstep.training.checkpoint import store, tensorfile

_MAX_NAMED: Final = 5  # maximum number of tensors listed in a message
_HOST_BYTES: Final = 64
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True)
class Disagreement:
    """The names of tensors that should be equal on all ranks, but differ.

    `minority_ranks` holds the ranks that differ from the majority, or None if there is no majority. `hosts` holds the
    host name of each rank.
    """

    names: tuple[str, ...]
    minority_ranks: tuple[int, ...] | None
    hosts: tuple[str, ...]

    @property
    def name_list(self) -> str:
        """The names of the differing tensors as text. A long list is truncated."""
        return list_some(self.names, _MAX_NAMED)

    @property
    def verdict(self) -> str:
        """A message that names the ranks that differ from the majority, or says that there is no majority."""
        if self.minority_ranks is None:
            ranks = "the two ranks" if len(self.hosts) == 2 else "the ranks"
            return f"{ranks} disagree without a majority, so the wrong rank is unknown"
        ranks = ", ".join(f"{rank} ({self.hosts[rank]})" for rank in self.minority_ranks)
        return f"rank {ranks} {'has' if len(self.minority_ranks) == 1 else 'have'} different values than the majority"


def check_initial_weights(world: World, model: nn.Module, advice: str) -> nn.Module:
    """Check that all ranks have built `model` with the same initial weights, and return it.

    All ranks call it before the model is sharded. Raises UsageError with `advice` if the weights differ between ranks.
    """
    tensors = {name: tensor.detach() for name, tensor in chain(model.named_parameters(), model.named_buffers())}
    if (difference := find_disagreement(world, tensors)) is not None:
        raise UsageError(f"initial weights: {difference.name_list}: {difference.verdict}; {advice}")
    return model


def find_disagreement(world: World, model: NamedTensors, weights_sha256: str = "") -> Disagreement | None:
    """Compare the tensors of a model across ranks. Return the differing tensors, or None if all ranks agree.

    All ranks must call it, and all ranks get the same result. `weights_sha256` is the SHA-256 of the unsharded tensors.
    If it is empty, the hash is computed.
    """
    if world.size == 1:
        return None
    shards = {name: value for name, value in model.items() if isinstance(value, Shard)}
    layout = hashlib.sha256(
        json.dumps([(name, *_describe_rows(shards[name])) for name in sorted(shards)]).encode()
    ).digest()
    own_digests = [weights_sha256 or store.weights_sha256(get_unsharded_tensors(model)), store.weights_sha256(shards)]
    digests = world.all_gather_bytes(layout + b"".join(map(bytes.fromhex, own_digests)))
    whole_digests = {digest[32:64] for digest in digests}
    if len(whole_digests) == 1 and len({digest[:32] for digest in digests}) == len(
        {digest[:32] + digest[64:] for digest in digests}
    ):
        return None
    return _compare_tensors(world, model)


def _compare_tensors(world: World, model: NamedTensors) -> Disagreement | None:
    names = sorted(model)
    host = world.host.encode()[:_HOST_BYTES].ljust(_HOST_BYTES)
    answers = world.all_gather_bytes(host + b"".join(_digest_tensor(model[name]) for name in names))
    differing_names, minority = [], set[int]()
    has_majority = True
    for number, name in enumerate(names):
        start = _HOST_BYTES + 2 * _DIGEST_BYTES * number
        same_rows: dict[bytes, list[tuple[int, bytes]]] = defaultdict(list)
        for rank, answer in enumerate(answers):
            rows, content = answer[start : start + _DIGEST_BYTES], answer[start + _DIGEST_BYTES :][:_DIGEST_BYTES]
            same_rows[rows].append((rank, content))
        for opinions in same_rows.values():
            if (odd_ranks := find_minority(opinions)) != []:
                differing_names.append(name)
                minority |= set(odd_ranks or ())
                has_majority = has_majority and odd_ranks is not None
    hosts = tuple(answer[:_HOST_BYTES].decode(errors="replace").rstrip() for answer in answers)
    return Disagreement(tuple(dict.fromkeys(differing_names)), tuple(sorted(minority)) if has_majority else None, hosts)


def _digest_tensor(value: MaybeSharded) -> bytes:
    """Return the digest of the row range that this rank holds, followed by the digest of its values."""
    rows = hashlib.sha256(json.dumps(_describe_rows(value)).encode()).digest()[:_DIGEST_BYTES]
    return rows + hashlib.sha256(tensorfile.to_bytes(get_local_tensor(value))).digest()[:_DIGEST_BYTES]


def _describe_rows(value: MaybeSharded) -> list[int]:
    return [value.first, *value.tensor.shape] if isinstance(value, Shard) else []
