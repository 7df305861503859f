"""Digests of the messages that a rank sends and receives in a step, to find the first rank that sent a wrong message.

The computation of a rank depends only on its role, its data and the messages that it has received. If two ranks in the
same role received the same messages but sent different messages, one of the two ranks is at fault, no matter which
messages follow.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import final

from torch import Tensor

from lockstep.comm.carrier import AddressedTensor, Carrier, Transfer
from lockstep.core.digest import Digests, TensorDigest

SENT, RECEIVED = " to ", " from "


def group_by_peer(messages: Mapping[str, str], direction: str) -> dict[int, list[str]]:
    """Return the messages to each peer (SENT) or from each peer (RECEIVED). Sender and receiver get the same text."""
    messages_by_peer: dict[int, list[str]] = {}
    for name, digest in messages.items():
        label, separator, suffix = name.rpartition(direction)
        peer, _, number = suffix.partition(" ")
        if separator and peer.isdecimal():
            messages_by_peer.setdefault(int(peer), []).append(f"{label} {number}: {digest}")
    return {peer: sorted(entries) for peer, entries in messages_by_peer.items()}


@final
class MessageLog:
    """Records the digest of each message of the watched carriers between `open` and `close`."""

    def __init__(self) -> None:
        self._digests = Digests()
        self._notes: dict[str, TensorDigest] | None = None  # by operation, peer and message number
        self._counts: Counter[str] = Counter()

    def open(self) -> None:
        """Clear the log and start recording."""
        self._notes = {}
        self._counts.clear()

    def close(self) -> dict[str, str]:
        """Stop recording, and return the digest of each message by name. Synchronizes with the device."""
        notes, self._notes = self._notes or {}, None
        return {name: note.to_text() for name, note in notes.items()}

    def record(self, name: str, tensor: Tensor) -> None:
        """Record the digest of a tensor if the log is open."""
        if self._notes is not None:
            self._counts[name] += 1
            self._notes[f"{name} #{self._counts[name]}"] = self._digests.make_tensor_digest(tensor)

    def watch(self, carrier: Carrier, label: str, ranks: Sequence[int]) -> Carrier:
        """Wrap a carrier to record the transferred tensors. `ranks` contains the rank of each peer of the carrier."""

        def start_transfer(sent: Sequence[AddressedTensor], received: Sequence[AddressedTensor]) -> Transfer:
            for tensor, peer in sent:
                self.record(f"{label}{SENT}{ranks[peer]}", tensor)
            transfer = carrier(sent, received)
            if self._notes is not None:
                transfer.on_arrival = partial(self._record_received, label, ranks, received)
            return transfer

        return start_transfer

    def _record_received(self, label: str, ranks: Sequence[int], received: Sequence[AddressedTensor]) -> None:
        for tensor, peer in received:
            self.record(f"{label}{RECEIVED}{ranks[peer]}", tensor)
