"""Ranks meet, say small exact things to each other, and refuse what cannot work before they start."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import worlds

from lockstep.comm.peer_errors import PeerLostError
from lockstep.comm.process_groups import ProcessGroups
from lockstep.comm.stream import InlineStream, ThreadStream
from lockstep.comm.world import World, _use_loopback_interface, choose_device, open_single_rank_group, open_world
from lockstep.common.rank import ALONE, RankInfo
from lockstep.core.mesh import Mesh
from lockstep.core.tree import LeafBlock
from lockstep.errors import UsageError
from lockstep.ranks.external import join_ranks

CPU = torch.device("cpu")


def place(world: World) -> tuple[int, int, int, int, str]:
    return world.rank, world.size, world.local_rank, world.local_size, str(world.device)


def added(world: World) -> tuple[list[int], list[float]]:
    whole = world.add_(torch.tensor([world.rank, 1]))
    disjoint = torch.zeros(world.size, dtype=torch.float64)
    disjoint[world.rank] = 0.1 * (world.rank + 1)
    return whole.tolist(), world.add_(disjoint).tolist()


def told(world: World, texts: list[str]) -> list[str]:
    return [world.broadcast_text(text if world.rank == 0 else "ignored") for text in texts]


def all_gather_json(world: World, texts: list[str]) -> list[str]:
    return world.all_gather_text(texts[world.rank])


def compared(world: World, odd: list[int]) -> str:
    try:
        world.compare({"recipe": {"seed": 1, "batch": 2}, "data": 5 if world.rank in odd else 4})
    except UsageError as error:
        return str(error)
    return "the same"


def agreed(world: World, levels: list[list[int]]) -> list[int]:
    heard = [world.agree_on_stop_level(level) for level in levels[world.rank]]
    return [*heard, world.agree_on_stop_level(0)]


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("size", [2, 3])
def test_places_and_sums(size: int) -> None:
    assert worlds.run(size, place) == [(rank, size, rank, size, "cpu") for rank in range(size)]
    total = [size * (size - 1) // 2, size], [0.1 * (rank + 1) for rank in range(size)]
    assert worlds.run(size, added) == [total] * size


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_every_rank_hears_rank_0() -> None:
    texts = ["", "/runs/épreuve ✓", "x" * 100_000]
    assert worlds.run(3, told, texts) == [texts] * 3


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_ranks_that_differ_are_named_on_all() -> None:
    assert worlds.run(3, compared, []) == ["the same"] * 3
    assert (
        worlds.run(3, compared, [1])
        == ["data: rank 1 differs from rank 0: 5, not 4; start all ranks with the same value"] * 3
    )
    assert (
        worlds.run(3, compared, [0])
        == ["data: rank 1, 2 differ from rank 0: 4, not 5; start all ranks with the same value"] * 3
    )


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("texts", [["a", "bcd", "e"], ["", "\u00fc" * 5000, ""], ["", "", ""]])
def test_each_rank_tells_all_others(texts: list[str]) -> None:
    assert worlds.run(3, all_gather_json, texts) == [texts] * 3


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_all_agree_one_step_later_on_the_largest_wish() -> None:
    levels = [[0, 1, 1], [0, 0, 2], [0, 0, 0]]
    heard = worlds.run(3, agreed, levels)
    assert heard == [[heard[0][0], 0, 1, 2]] * 3


def beside(world: World, store: str) -> tuple[list[int], list[int], bool]:
    """Open a world where one is open, and close it."""
    before = dist.group.WORLD
    info = RankInfo(world.rank, world.size, world.rank, world.size, "ray")
    other = open_world(join_ranks(info, store, 60.0), CPU)
    sums = other.duplicate().add_(other.add_(torch.tensor([world.rank, 1]))).tolist()
    other.close()
    return sums, world.add_(torch.tensor([world.rank, 1])).tolist(), dist.group.WORLD is before


def beside_others(world: World, store: str) -> str:
    info = RankInfo(world.size - 1 - world.rank, world.size, world.rank, world.size, "ray")
    try:
        open_world(join_ranks(info, store, 60.0), CPU)
    except UsageError as error:
        return str(error)
    return "opened"


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_a_process_group_that_is_open_is_left_alone(tmp_path: Path) -> None:
    assert worlds.run(2, beside, f"file://{tmp_path}/store") == [([2, 4], [1, 2], True)] * 2


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_a_process_group_of_other_ranks_is_refused(tmp_path: Path) -> None:
    found = worlds.run(2, beside_others, f"file://{tmp_path}/store")
    assert found[0].startswith(
        "torch.distributed: this process is rank 0 of 2 in the open process group, expected rank 1"
    )
    assert "rank 1 of 2 in the open process group, expected rank 0 of 2; call lockstep.join before" in found[1]


def test_a_world_of_one_sends_nothing() -> None:
    world = World(ALONE, CPU)
    assert (world.rank, world.size, world.host) == (0, 1, socket.gethostname())
    assert world.add_(torch.tensor([3.0])).tolist() == [3.0]
    assert world.broadcast_text("text") == "text"
    assert world.all_gather_text("text") == ["text"]
    assert [world.agree_on_stop_level(level) for level in (0, 2, 1)] == [0, 2, 1]
    world.compare({"anything": 1})
    world.barrier()
    assert world.make_canonical_sum(Mesh())({LeafBlock(0, 1): torch.ones(2)}, 1, torch.empty(2)).tolist() == [1.0, 1.0]
    assert isinstance(world.make_stream(), InlineStream)
    assert world.get_generators() == [torch.default_generator]
    world.close()


def test_a_world_whose_process_group_a_script_has_left_is_closed() -> None:
    open_single_rank_group(World(ALONE, CPU))
    world = World(ALONE, CPU, ProcessGroups(dist.group.WORLD, dist.group.WORLD))
    dist.destroy_process_group()
    world.close()


def lane_kind(world: World) -> str:
    stream = world.make_stream()
    stream.close()
    return type(stream).__name__


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_more_than_one_process_have_a_lane_beside() -> None:
    assert worlds.run(2, lane_kind) == [ThreadStream.__name__] * 2


def lost(world: World) -> str:
    if world.rank == 1:
        os._exit(1)
    try:
        for _ in range(3):
            world.barrier()
    except PeerLostError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_a_rank_that_dies_is_an_error_of_its_own_kind_on_the_others() -> None:
    with pytest.raises(worlds.WorldError, match="rank 1 of 2: the process died") as caught:
        worlds.run(2, lost)
    assert caught.value.answers[0].startswith("lost another rank during a collective (")
    assert "\n" not in caught.value.answers[0]


@pytest.mark.parametrize(
    ("device", "count", "local_rank", "problem"),
    [
        ("cuda", 0, 0, "placement.device: cuda is not available, because torch finds no CUDA device; use cpu or auto"),
        ("auto", 2, 2, "placement.processes: 3 processes on this host but only 2 CUDA devices; use at most 2, or "),
    ],
)
def test_devices_that_are_not_there_are_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, count: int, local_rank: int, problem: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(UsageError) as caught:
        choose_device(device, RankInfo(local_rank, 3, local_rank, 3, "torchrun"))  # type: ignore[arg-type]
    assert str(caught.value).startswith(problem)


def test_ranks_share_devices_where_gloo_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    chosen = [choose_device("auto", RankInfo(rank, 3, rank, 3, "torchrun"), "gloo") for rank in range(3)]
    assert chosen == taken == [torch.device("cuda", number) for number in (0, 1, 0)]
    for backend in ("auto", "nccl"):
        with pytest.raises(UsageError, match=r"3 processes on this host but only 2 CUDA .*placement\.backend=gloo"):
            choose_device("auto", RankInfo(2, 3, 2, 3, "torchrun"), backend)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^placement\.backend: nccl does not support CPU tensors, and this run is"):
        choose_device("cpu", RankInfo(0, 1, 0, 1, "none"), "nccl")


@pytest.mark.parametrize(("device", "count"), [("cpu", 0), ("cpu", 4), ("auto", 0)])
def test_the_cpu_is_taken_where_asked_for_or_where_there_is_nothing_else(
    monkeypatch: pytest.MonkeyPatch, device: str, count: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert choose_device(device, RankInfo(0, 1, 0, 1, "none")) == CPU  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [True, False])
def test_variables_for_several_hosts_hold_for_no_run_of_our_own_on_one(own: bool, monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    _use_loopback_interface(own)
    assert os.environ["GLOO_SOCKET_IFNAME"] == ("lo" if own else "ib0")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
