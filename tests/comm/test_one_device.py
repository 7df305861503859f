"""Ranks that have one device between them: NCCL refuses them on all ranks, gloo carries their tensors."""

from types import SimpleNamespace
from typing import Literal
from unittest import mock

import pytest
import torch
import worlds

from lockstep.comm.world import World, _find_ranks_sharing_device
from lockstep.errors import UsageError

pytestmark = [pytest.mark.slow("several ranks"), pytest.mark.worlds]


def found(
    world: World, names: list[str], backend: Literal["nccl", "gloo"], hosts: tuple[str, ...] = ()
) -> str | list[list[int]]:
    """Return what a rank whose device has this name finds; that there is a device at all is feigned."""
    device = SimpleNamespace(uuid=names[world.rank])
    variables = {"NCCL_HOSTID": hosts[world.rank]} if hosts else {}
    feigned = mock.patch.object(torch.cuda, "get_device_properties", return_value=device)
    with feigned, mock.patch.dict("os.environ", variables):
        try:
            return _find_ranks_sharing_device(world, backend)
        except UsageError as error:
            return str(error)


def test_two_ranks_on_one_device_are_refused_on_all_ranks() -> None:
    [said] = set(worlds.run(3, found, ["GPU-a", "GPU-b", "GPU-a"], "nccl"))
    assert said.startswith("placement.device: ranks 0, 2 share one CUDA device; let the launcher assign a")
    assert said.endswith("or use placement.backend=gloo, which lets processes share a device")


def test_gloo_lets_them_share_and_names_them() -> None:
    assert worlds.run(3, found, ["GPU-a", "GPU-b", "GPU-a"], "gloo") == [[[0, 2]]] * 3


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_ranks_with_devices_of_their_own_do_not(backend: str) -> None:
    assert worlds.run(3, found, ["GPU-a", "GPU-b", "GPU-c"], backend) == [[]] * 3


@pytest.mark.parametrize(
    ("hosts", "refused"), [(("x", "y", "z"), False), (("x", "x", "x"), True), (("x", "y", "x"), True)]
)
def test_nccl_takes_them_for_ranks_of_several_hosts_where_it_is_told_so(hosts: tuple[str, ...], refused: bool) -> None:
    answers = worlds.run(3, found, ["GPU-a", "GPU-b", "GPU-a"], "nccl", hosts)
    assert all(isinstance(each, str) for each in answers) if refused else answers == [[[0, 2]]] * 3
