"""Ranks that have one device between them are told so, all of them."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import worlds

from lockstep.errors import UsageError
from lockstep.runtime.world import World, _check_devices


def told(world: World, names: list[str]) -> str:
    """Return what is told to a rank whose device has this name; that there is a device at all is feigned."""
    device = SimpleNamespace(uuid=names[world.rank])
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=device):
        try:
            _check_devices(world)
        except UsageError as error:
            return str(error)
    return ""


@pytest.mark.worlds
def test_two_ranks_on_one_device_are_refused_on_all_ranks() -> None:
    said = worlds.run(3, told, ["GPU-a", "GPU-b", "GPU-a"])
    assert len(set(said)) == 1
    assert said[0].startswith("placement.device: ranks 0, 2 have one CUDA device between them; let the launcher show")


@pytest.mark.worlds
def test_ranks_with_devices_of_their_own_are_not() -> None:
    assert worlds.run(3, told, ["GPU-a", "GPU-b", "GPU-c"]) == ["", "", ""]
