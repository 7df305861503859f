"""A log has the digest of each message and of whom it was with, in the order of time, and only while it is open."""

from collections.abc import Sequence

import torch

from lockstep.comm.carrier import AddressedTensor, Carrier, Transfer, renumber_ranks
from lockstep.comm.message_log import RECEIVED, SENT, MessageLog, group_by_peer


def carrier(asked: list[tuple[str, int]]) -> Carrier:
    """Return what notes whom it was asked to send to and to receive from, which are ones."""

    def start(sent: Sequence[AddressedTensor], received: Sequence[AddressedTensor]) -> Transfer:
        asked.extend([("to", peer) for _, peer in sent] + [("from", peer) for _, peer in received])
        for tensor, _ in received:
            tensor.fill_(1)
        return Transfer([], [], [])

    return start


def test_messages_are_noted_while_it_is_open() -> None:
    log, asked = MessageLog(), []
    watched = log.watch(carrier(asked), "along tensor", [2, 5])
    noted = []
    for opened in (False, True, True):
        if opened:
            log.open()
        for number in range(2):
            came = torch.zeros(3)
            watched([(torch.full((3,), float(number)), 0)], [(came, 1)]).wait()
            log.record("the loss", came)
        noted.append(log.close())
    assert noted[0] == {}
    assert noted[1] == noted[2]
    names = [
        f"{what} #{number}" for number in (1, 2) for what in ("along tensor to 2", "along tensor from 5", "the loss")
    ]
    assert list(noted[1]) == names
    assert noted[1][names[0]] != noted[1][names[1]] == noted[1][names[2]] == noted[1][names[3]]
    assert asked == [("to", 0), ("from", 1)] * 6


def test_ranks_have_other_numbers_for_who_calls_them_otherwise() -> None:
    asked: list[tuple[str, int]] = []
    renumber_ranks(carrier(asked), [2, 0, 1])([(torch.zeros(1), 0)], [(torch.zeros(1), 1), (torch.zeros(1), 2)]).wait()
    assert asked == [("to", 2), ("from", 0), ("from", 1)]


def test_both_ends_of_a_link_call_a_message_the_same() -> None:
    sent = {"rows to 2 #1": "a", "along tensor, context to 2 #1": "b", "rows to 1 #1": "c", "the loss #1": "d"}
    received = {"rows from 0 #1": "a", "along tensor, context from 0 #1": "b"}
    assert (
        group_by_peer(sent, SENT)[2]
        == group_by_peer(received, RECEIVED)[0]
        == ["along tensor, context #1: b", "rows #1: a"]
    )
    assert group_by_peer(sent, SENT).keys() == {1, 2}
    assert group_by_peer(sent, RECEIVED) == {}
