"""Rank 0 answers calls, at once or later; no other interface than gloo's can be called."""

import os
from pathlib import Path

import psutil
import pytest
import torch
import worlds
from torch import Tensor
from torch.futures import Future

from lockstep.comm.rpc import Rpc
from lockstep.comm.world import World

pytestmark = [pytest.mark.slow("several ranks"), pytest.mark.worlds]


def double(tensor: Tensor) -> Tensor:
    return 2 * tensor


def later() -> Future[Tensor]:
    """Return what is there once another rank has called `give`."""
    return waiting["later"]


def give(value: Tensor) -> None:
    waiting["later"].set_result(value)


def wrong() -> None:
    raise ValueError("not this way")


waiting: dict[str, Future[Tensor]] = {}


def asked(world: World) -> tuple[float, float, str]:
    waiting["later"] = Future()
    calls = Rpc(world, double, later, give, wrong)
    found = float(calls.call_server("double", torch.tensor(world.rank + 1.0)))
    if world.rank == 1:
        calls.call_server("give", torch.tensor(7.0))
    given = float(calls.call_server("later"))
    try:
        calls.call_server("wrong")
    except ValueError as error:
        return found, given, str(error)
    finally:
        calls.close()
    return found, given, "nothing"


@pytest.mark.parametrize("again", [False, True])
def test_rank_0_answers(again: bool) -> None:
    """Again in the same processes: what is closed leaves nothing behind."""
    found = worlds.run(3, asked)
    assert [(doubled, given) for doubled, given, _ in found] == [(2.0, 7.0), (4.0, 7.0), (6.0, 7.0)]
    assert all("not this way" in text for _, _, text in found)


def listening(world: World) -> tuple[set[str], bool]:
    before = listeners()
    calls = Rpc(world)
    opened = listeners() - before
    calls.close()
    return {address for address, _ in opened}, listeners() <= before


def listeners() -> set[tuple[str, int]]:
    found = psutil.Process(os.getpid()).net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_calls_listen_at_the_loopback_interface_alone_and_not_for_ever() -> None:
    for addresses, closed in worlds.run(2, listening):
        assert addresses == {"127.0.0.1"}
        assert closed
