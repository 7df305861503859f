"""What a rank sent and received in a step, as digests: so it can be told which rank first sent what it should not have.

Between two exchanges a rank is a function of its place, its data and what it has received. Where two ranks in the same
place received the same and then sent another thing each, one of them is at fault, whatever came of it later.
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
    """Return what was sent to each other rank, or received from it, in the same words on both."""
    found: dict[int, list[str]] = {}
    for what, digest in messages.items():
        label, between, rest = what.rpartition(way)
        peer, _, number = rest.partition(" ")
        if between and peer.isdecimal():
            found.setdefault(int(peer), []).append(f"{label} {number}: {digest}")
    return {peer: sorted(listed) for peer, listed in found.items()}


@final
class MessageLog:
    """Notes messages while it is open; of the carriers that it watches."""

    def __init__(self) -> None:
        self._digests = Digests()
        self._notes: dict[str, Noted] | None = None  # by what was done and with whom, in the order of time
        self._counts: Counter[str] = Counter()

    def open(self) -> None:
        """Begin, with nothing noted."""
        self._notes = {}
        self._counts.clear()

    def close(self) -> dict[str, str]:
        """End, and return the digest of each message; waits for the device."""
        notes, self._notes = self._notes or {}, None
        return {what: noted.text() for what, noted in notes.items()}

    def note(self, what: str, tensor: Tensor) -> None:
        """Note a tensor as this rank has it now, if the log is open."""
        if self._notes is not None:
            self._counts[what] += 1
            self._notes[f"{what} #{self._counts[what]}"] = self._digests.noted(tensor)

    def watch(self, carrier: Carrier, label: str, ranks: Sequence[int]) -> Carrier:
        """Return a carrier that does the same and is noted: between `ranks`, which it knows by their order here."""

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
