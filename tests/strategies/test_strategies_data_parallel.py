"""Replicas in one process: which devices they have, and what is refused before anything starts."""

import re
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from lockstep.errors import UsageError
from lockstep.strategies.data_parallel import Strategy


def names(strategy: Strategy, cards: int) -> list[str]:
    return [str(device) for device in strategy.replica_devices(cards)]


def test_all_devices_have_a_replica_by_default_and_two_stand_for_them_on_a_cpu() -> None:
    assert names(Strategy(), 3) == ["cuda:0", "cuda:1", "cuda:2"]
    assert names(Strategy(), 0) == ["cpu", "cpu"]
    assert names(Strategy((3, 1), 1), 4) == ["cuda:3", "cuda:1"]
    assert names(Strategy((3, 1, 5)), 0) == ["cpu"] * 3


@pytest.mark.parametrize(
    ("options", "processes", "problem"),
    [
        ({}, 2, "requires 1 process, which uses all devices, got 2; use placement.processes=1 or strategy ddp"),
        ({"device_ids": ()}, 1, "device_ids is empty"),
        ({"device_ids": (0, 1, 0)}, 1, "device_ids contains 0 more than once"),
        ({"device_ids": (0, 1), "output_device": 2}, 1, "output_device=2 is not one of the device_ids 0, 1"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], processes: int, problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        Strategy(**options).check(processes, 4)


@pytest.mark.parametrize(
    ("options", "cards", "problem"),
    [
        ({"device_ids": (0, 2)}, 2, "CUDA device 2 does not exist; this process sees devices 0 to 1"),
        ({"device_ids": (1,)}, 1, "CUDA device 1 does not exist; this process sees only device 0"),
        ({"output_device": 4}, 4, "CUDA device 4 does not exist; this process sees devices 0 to 3"),
        ({"output_device": 2}, 0, "output_device=2 is not one of the 2 replicas; use 0, 1, or set device_ids"),
    ],
)
def test_a_device_that_does_not_exist_is_refused(options: dict[str, Any], cards: int, problem: str) -> None:
    Strategy(**options).check(1, 4)
    with pytest.raises(UsageError, match=re.escape(problem)):
        Strategy(**options).replica_devices(cards)


def test_fewer_micro_batches_than_replicas_will_do() -> None:
    Strategy(tuple(range(8))).check(1, 1)


@pytest.mark.parametrize("options", [{"device_ids": [-1]}, {"device_ids": ["cuda"]}, {"output_device": "first"}])
def test_a_device_is_a_number(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Strategy).validate_python(options)
    assert TypeAdapter(Strategy).validate_python({"device_ids": [1, 0]}).device_ids == (1, 0)


def test_no_device_is_touched_to_name_it() -> None:
    assert Strategy().replica_devices(2)[1] == torch.device("cuda", 1)
