"""Digests of the messages that a rank sent and received in a step, to find the rank that first sent a wrong message.

Between two messages, a rank is a function of its place, its data and the messages it received. If two ranks in the same
place received the same messages and then sent different ones, one of them is at fault, regardless of what followed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import final

from torch import Tensor

from lockstep.comm.carrier import Addressed, Carrier, Transfer
from lockstep.core.digest import Digests, Noted

SENT, RECEIVED = " to ", " from "


def by_peer(messages: Mapping[str, str], way: str) -> dict[int, list[str]]:
    """Return the messages sent to each peer or received from it, in a form that is equal on both ranks."""
    messages_by_peer: dict[int, list[str]] = {}
    for name, digest in messages.items():
        label, separator, suffix = name.rpartition(way)
        peer, _, number = suffix.partition(" ")
        if separator and peer.isdecimal():
            messages_by_peer.setdefault(int(peer), []).append(f"{label} {number}: {digest}")
    return {peer: sorted(entries) for peer, entries in messages_by_peer.items()}


@final
class MessageLog:
    """Records the messages of the carriers that it watches, while it is open."""

    def __init__(self) -> None:
        self._digests = Digests()
        self._notes: dict[str, Noted] | None = None  # by operation and peer, in order of time
        self._counts: Counter[str] = Counter()

    def open(self) -> None:
        """Start recording, with an empty log."""
        self._notes = {}
        self._counts.clear()

    def close(self) -> dict[str, str]:
        """Stop recording, and return the digest of each message. Waits for the device."""
        notes, self._notes = self._notes or {}, None
        return {name: note.text() for name, note in notes.items()}

    def note(self, name: str, tensor: Tensor) -> None:
        """Record a tensor as this rank has it now, if the log is open."""
        if self._notes is not None:
            self._counts[name] += 1
            self._notes[f"{name} #{self._counts[name]}"] = self._digests.noted(tensor)

    def watch(self, carrier: Carrier, label: str, ranks: Sequence[int]) -> Carrier:
        """Return a carrier that does the same and is recorded. `ranks` maps its peers to ranks."""

        def start(sent: Sequence[Addressed], received: Sequence[Addressed]) -> Transfer:
            for tensor, peer in sent:
                self.note(f"{label}{SENT}{ranks[peer]}", tensor)
            transfer = carrier(sent, received)
            if self._notes is not None:
                transfer.landed = partial(self._note_received, label, ranks, received)
            return transfer

        return start

    def _note_received(self, label: str, ranks: Sequence[int], received: Sequence[Addressed]) -> None:
        for tensor, peer in received:
            self.note(f"{label}{RECEIVED}{ranks[peer]}", tensor)
