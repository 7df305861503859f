"""Exchanges that are not Lockstep's: each of torch's is seen before it begins, and those of Lockstep never."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed import all_reduce  # as users have it: before anything watches

from lockstep.comm.exchanges import intercept_collectives
from lockstep.comm.world import World


class SeenError(Exception):
    """Stands for the refusal."""


def refuse(name: str) -> None:
    raise SeenError(name)


def one() -> Tensor:
    return torch.ones(2)


CALLS: dict[str, Callable[[], Any]] = {
    "all_gather": lambda: dist.all_gather([one(), one()], one()),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(4), one()),
    "all_gather_object": lambda: dist.all_gather_object([None, None], 1),
    "all_reduce": lambda: all_reduce(one()),
    "all_to_all": lambda: dist.all_to_all([one(), one()], [one(), one()]),
    "all_to_all_single": lambda: dist.all_to_all_single(one(), one()),
    "barrier": lambda: dist.barrier(),
    "batch_isend_irecv": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, one(), 1)]),
    "broadcast": lambda: dist.broadcast(one(), 0),
    "broadcast_object_list": lambda: dist.broadcast_object_list([1], 0),
    "gather": lambda: dist.gather(one(), [one(), one()]),
    "gather_object": lambda: dist.gather_object(1, [None, None]),
    "irecv": lambda: dist.irecv(one(), 1),
    "isend": lambda: dist.isend(one(), 1),
    "monitored_barrier": lambda: dist.monitored_barrier(),
    "recv": lambda: dist.recv(one(), 1),
    "reduce": lambda: dist.reduce(one(), 0),
    "reduce_scatter": lambda: dist.reduce_scatter(one(), [one(), one()]),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one(), torch.ones(4)),
    "scatter": lambda: dist.scatter(one(), [one(), one()]),
    "scatter_object_list": lambda: dist.scatter_object_list([None], [1, 2]),
    "send": lambda: dist.send(one(), 1),
}


FUNCTIONAL: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: functional.all_reduce(one(), "sum", dist.group.WORLD),
    "all_reduce_coalesced": lambda: functional.all_reduce_coalesced([one()], "sum", dist.group.WORLD),
    "all_to_all_single": lambda: functional.all_to_all_single(one(), None, None, dist.group.WORLD),
    "broadcast": lambda: functional.broadcast(one(), 0, dist.group.WORLD),
}


def each_is_refused(world: World) -> list[tuple[str, str]]:
    """Return what is said of each call; not all ranks need to call it, since none waits."""
    found = []
    with intercept_collectives(refuse):
        for name, call in (*CALLS.items(), *FUNCTIONAL.items()) if not world.rank else ():
            try:
                call()
            except SeenError as error:
                found.append((name, str(error)))
        world.barrier()
        assert dist.get_rank() == world.rank
        assert dist.get_world_size(dist.group.WORLD) == 2
        assert dist.get_backend() == "gloo"
    return found


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_each_of_torch_is_refused_by_its_name_and_questions_are_not() -> None:
    assert worlds.run(2, each_is_refused)[0] == [(name, name) for name in (*CALLS, *FUNCTIONAL)]


def of_ours(world: World) -> list[float]:
    told: list[str] = []
    with intercept_collectives(told.append):
        total = world.add_(torch.ones(1))
        within = torch.ones(1)
        all_reduce(within)
    world.barrier()
    all_reduce(torch.ones(1))
    assert set(told) == {"all_reduce"}
    return [float(total), float(within)]


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_one_that_is_let_through_does_its_work_and_afterwards_none_is_seen() -> None:
    assert worlds.run(2, of_ours) == [[2.0, 2.0]] * 2


def test_a_process_that_is_alone_is_told_the_same() -> None:
    for call in (lambda: all_reduce(one()), dist.barrier, dist.new_group):
        with intercept_collectives(refuse), pytest.raises(SeenError):
            call()
    with pytest.raises(ValueError, match="not been initialized"):
        all_reduce(one())
