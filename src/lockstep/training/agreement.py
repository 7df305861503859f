"""Whether the ranks hold the same weights and buffers, and which rank is the odd one where they do not.

What all have whole must be the same on all; of what is cut, what the ranks that hold the same rows have. Two digests of
each rank see whether it is. Only where it is not are tensors compared one by one.
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
from lockstep.core.majority import odd_ones
from lockstep.core.shard import MaybeSharded, NamedTensors, Shard, local_tensor, whole_tensors
from lockstep.errors import UsageError
from lockstep.training.checkpoint import store, tensorfile

_NAMED: Final = 5  # tensors that a message lists
_HOST_BYTES: Final = 64
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True)
class Disagreement:
    """Tensors of which ranks that should hold the same do not. `odd` has those outvoted; None: nobody is."""

    names: tuple[str, ...]
    odd: tuple[int, ...] | None
    hosts: tuple[str, ...]  # by rank

    @property
    def listed(self) -> str:
        """The names, or the first of them."""
        return list_some(self.names, _NAMED)

    @property
    def who(self) -> str:
        """Which rank is the odd one, or why that is unknown."""
        if self.odd is None:
            equal = "two ranks" if len(self.hosts) == 2 else "as many ranks as others"
            return f"{equal} disagree, so which is wrong cannot be told"
        ranks = ", ".join(f"{rank} ({self.hosts[rank]})" for rank in self.odd)
        return f"rank {ranks} {'has' if len(self.odd) == 1 else 'have'} other values than the majority"


def agreed(world: World, model: nn.Module, advice: str) -> nn.Module:
    """Return a model that every rank built; UsageError, with `advice`, where another one built other weights.

    For models that are whole: once a strategy has cut them, ranks may hold nothing in common.
    """
    held = {name: each.detach() for name, each in chain(model.named_parameters(), model.named_buffers())}
    if (found := disagreement(world, held)) is not None:
        raise UsageError(f"first weights: {found.listed}: {found.who}; {advice}")
    return model


def disagreement(world: World, model: NamedTensors, weights: str = "") -> Disagreement | None:
    """Compare what the ranks hold of a model; None where they agree. All ranks call it, and get the same.

    `weights` is the SHA-256 of what is whole of it, where that is known already.
    """
    if world.size == 1:
        return None
    cut = {name: held for name, held in model.items() if isinstance(held, Shard)}
    layout = hashlib.sha256(json.dumps([(name, *_rows(cut[name])) for name in sorted(cut)]).encode()).digest()
    own = [weights or store.weights_sha256(whole_tensors(model)), store.weights_sha256(cut)]
    digests = world.gather(layout + b"".join(map(bytes.fromhex, own)))
    wholes = {each[32:64] for each in digests}
    if len(wholes) == 1 and len({each[:32] for each in digests}) == len({each[:32] + each[64:] for each in digests}):
        return None
    return _find_disagreement(world, model)


def _find_disagreement(world: World, model: NamedTensors) -> Disagreement | None:
    names = sorted(model)
    host = world.host.encode()[:_HOST_BYTES].ljust(_HOST_BYTES)
    answers = world.gather(host + b"".join(_digest(model[name]) for name in names))
    differing, odd = [], set[int]()
    decided = True
    for number, name in enumerate(names):
        start = _HOST_BYTES + 2 * _DIGEST_BYTES * number
        same_rows: dict[bytes, list[tuple[int, bytes]]] = defaultdict(list)
        for rank, answer in enumerate(answers):
            rows, content = answer[start : start + _DIGEST_BYTES], answer[start + _DIGEST_BYTES :][:_DIGEST_BYTES]
            same_rows[rows].append((rank, content))
        for opinions in same_rows.values():
            if (found := odd_ones(opinions)) != []:
                differing.append(name)
                odd |= set(found or ())
                decided = decided and found is not None
    hosts = tuple(answer[:_HOST_BYTES].decode(errors="replace").rstrip() for answer in answers)
    return Disagreement(tuple(dict.fromkeys(differing)), tuple(sorted(odd)) if decided else None, hosts)


def _digest(held: MaybeSharded) -> bytes:
    """Return which rows are held, and what is in them: two digests."""
    rows = hashlib.sha256(json.dumps(_rows(held)).encode()).digest()[:_DIGEST_BYTES]
    return rows + hashlib.sha256(tensorfile.raw(local_tensor(held))).digest()[:_DIGEST_BYTES]


def _rows(held: MaybeSharded) -> list[int]:
    return [held.first, *held.tensor.shape] if isinstance(held, Shard) else []
