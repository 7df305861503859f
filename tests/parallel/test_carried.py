"""What carries tensors changes no bit, and a pipeline works over one that blocks as NCCL does."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import toys
import worlds
from pipeline_models import in_pipeline, own_trace, recipe
from same_bits import alone

from lockstep.comm.carrier import AddressedTensor, Carrier, make_direct_carrier, make_staged_carrier
from lockstep.comm.world import World
from lockstep.common.rank import ALONE, RankInfo

pytestmark = [pytest.mark.slow("several ranks"), pytest.mark.worlds]
CPU = torch.device("cpu")
LOCAL = [
    ("ddp", 2, ()),
    ("ddp", 3, ()),
    ("ddp", 4, ()),
    ("zero1", 3, ()),
    ("zero1", 2, (("offload", 1),)),
    ("zero2", 4, ()),
    ("zero3", 3, ()),
    ("hsdp", 4, (("replicate", 2),)),
]
PIPELINES: list[tuple[int, dict[str, Any]]] = [
    (2, {"schedule": "1f1b"}),
    (3, {"schedule": "gpipe"}),
    (2, {"schedule": "interleaved"}),
    (3, {"schedule": "interleaved"}),
    (3, {"schedule": "zero_bubble"}),
    (4, {"schedule": "1f1b", "replicate": 2}),
    (4, {"schedule": "zero_bubble", "shard": 2}),
]


class Rendezvous:
    """Works off what is started in one group in order, and ends a send only once the other rank receives: as NCCL.

    What waits in a step on a device's stream waits here in a thread. `kept` is how many numbers it carried.
    """

    kept = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._line = ThreadPoolExecutor(1)

    def __call__(self, sent: Sequence[AddressedTensor], received: Sequence[AddressedTensor]) -> Any:
        return Waiting(self._line.submit(self._run, [*sent], [*received]))

    def _run(self, sent: list[AddressedTensor], received: list[AddressedTensor]) -> None:
        Rendezvous.kept += sum(tensor.numel() for tensor, _ in sent)
        carrier = make_direct_carrier(self._group)
        carrier(sent, received).wait()
        answers = [(torch.zeros(1), peer) for _, peer in received]
        carrier(answers, [(torch.zeros(1), peer) for _, peer in sent]).wait()


class Waiting:
    """A transfer of Rendezvous."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result(20.0)

    def is_done(self) -> bool:
        return self._future.done()


def carried(
    world: World, carry: Callable[[dist.ProcessGroup], Carrier], backend: Literal["nccl", "gloo"] = "gloo"
) -> World:
    """Return the ranks of a world that is carried otherwise. `nccl` gives it that one's edges, by gloo."""
    info = RankInfo(world.rank, world.size, world.local_rank, world.local_size, "part")
    assert world._groups is not None
    return World(info, CPU, replace(world._groups, make_carrier=carry, backend=backend))


def staged_trace(world: World, case: toys.Case) -> toys.Trace:
    return toys.whole_trace(carried(world, make_staged_carrier), case)


@pytest.mark.parametrize(("strategy", "size", "options"), LOCAL)
def test_by_way_of_the_host_the_bits_are_those_of_one_process(strategy: str, size: int, options: Any) -> None:
    expected = alone(toys.Case(6, clip=0.1, optimizer="adamw"))
    case = toys.Case(6, clip=0.1, optimizer="adamw", strategy=strategy, options=options)
    assert worlds.run(size, staged_trace, case) == [expected] * size


def staged_pipeline(world: World, options: dict[str, Any]) -> toys.Trace:
    return own_trace(carried(world, make_staged_carrier), in_pipeline(recipe(clip=0.1), options))


def nccl_pipeline(world: World, options: dict[str, Any]) -> toys.Trace:
    before = Rendezvous.kept
    placed = carried(world, Rendezvous, "nccl")
    trace = own_trace(placed, in_pipeline(recipe(clip=0.1), options))
    assert Rendezvous.kept > before + 1000
    return trace


@cache
def pipeline_alone() -> toys.Trace:
    return own_trace(World(ALONE, CPU), recipe(clip=0.1))


def assert_same(size: int, run: Callable[..., toys.Trace], options: dict[str, Any]) -> None:
    whole = pipeline_alone()
    for trace in worlds.run(size, run, options):
        assert {name for name in trace if trace[name] != whole[name]} == set()


# The host's way is one for all schedules, which the test after this one has all of.
BEYOND = pytest.mark.slow("pipelines of each kind go by Rendezvous, and two of them by the host")
BY_HOST = [pytest.param(*placed, marks=() if placed[1]["schedule"] == "1f1b" else BEYOND) for placed in PIPELINES]


@pytest.mark.parametrize(("size", "options"), BY_HOST)
def test_a_pipeline_by_way_of_the_host_has_the_bits_of_one_process(size: int, options: dict[str, Any]) -> None:
    assert_same(size, staged_pipeline, options)


@pytest.mark.parametrize(("size", "options"), PIPELINES)
def test_a_pipeline_does_not_wait_for_itself_where_sends_wait_for_receivers(size: int, options: dict[str, Any]) -> None:
    assert_same(size, nccl_pipeline, options)


def crossing(world: World, one_way: bool) -> float:
    """Send to the other rank and then receive, on both ranks."""
    other = 1 - world.rank
    edge = carried(world, Rendezvous, "nccl").connect([other])[other]
    if not one_way:
        both = Rendezvous(dist.new_group([0, 1]))
        edge = edge._replace(outbound=both, inbound=both)
    sent, received = torch.full((3,), float(world.rank)), torch.empty(3)
    leaving = edge.outbound([(sent, edge.peer)], [])
    arriving = edge.inbound([], [(received, edge.peer)])
    try:
        arriving._future.result(3.0)  # type: ignore[attr-defined]
    except TimeoutError:
        return -1.0
    leaving.wait()
    return received[0].item()


def test_two_ranks_that_send_first_need_a_group_for_each_direction() -> None:
    assert worlds.run(2, crossing, True) == [1.0, 0.0]


def test_and_wait_for_ever_in_one() -> None:
    """Otherwise the tests above could not fail."""
    assert worlds.run(2, crossing, False) == [-1.0, -1.0]
