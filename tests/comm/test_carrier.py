"""Tensors by way of the host: in which order, from which memory, and over which groups."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import worlds
from torch import Tensor
from torch._subclasses import FakeTensorMode

from lockstep.comm import carrier
from lockstep.comm.carrier import AddressedTensor, Transfer, make_staged_carrier
from lockstep.comm.world import World
from lockstep.common.rank import RankInfo
from lockstep.core.mesh import Mesh

CPU = torch.device("cpu")


def mesh_backends(world: World) -> list[str]:
    """Return the backends of the groups that fully_shard uses, where torch sees a CUDA device beside gloo."""
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        assert world._groups is not None
        info = RankInfo(world.rank, world.size, 0, 1, "part")
        placed = World(info, CPU, replace(world._groups, make_carrier=make_staged_carrier))
        return [
            dist.get_backend(placed.make_device_mesh(Mesh(4 // members, shard=members), "shard").get_group())
            for members in (2, 4)
        ]


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_no_group_of_nccl_is_made_beside_gloo() -> None:
    assert worlds.run(4, mesh_backends) == [["gloo", "gloo"]] * 4


def test_gloo_reads_what_was_copied_from_a_device_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without memory: the order of things, and that none of them reaches the backend."""
    done: list[str] = []
    stream = mock.Mock(synchronize=lambda: done.append("synchronized"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    def started(group: object, sent: list[AddressedTensor], received: list[AddressedTensor]) -> list[Any]:
        assert all(tensor.device == CPU for tensor, _ in sent + received)
        assert [len(tensor) for tensor, _ in sent + received] == [4, 2]
        done.append("started")
        return [mock.Mock(wait=lambda: done.append("waited"))]

    monkeypatch.setattr(carrier, "_start_transfers", started)
    empty_host_tensor = carrier.empty_host_tensor

    def noted(tensor: Tensor) -> Tensor:
        done.append("host")
        return empty_host_tensor(tensor)

    monkeypatch.setattr(carrier, "empty_host_tensor", noted)
    with FakeTensorMode():
        sent, received = torch.ones(4, device="cuda"), torch.ones(2, device="cuda")
        transfer = make_staged_carrier(mock.Mock())([(sent, 1)], [(received, 1)])
        assert done == ["host", "synchronized", "host", "started"]
        assert not transfer.is_done()
        transfer.wait()
    assert done[-1] == "waited"


def test_memory_goes_once_all_is_known_to_be_done() -> None:
    works = [mock.Mock(is_completed=lambda: True), mock.Mock(is_completed=lambda: False)]
    assert Transfer(works[:1], [], []).is_done()
    assert not Transfer(works, [], []).is_done()
