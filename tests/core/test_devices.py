"""Which device is a process's own."""

import pytest

from lockstep.core.devices import choose_device_index, find_shared_devices, resolve_backend
from lockstep.errors import UsageError


@pytest.mark.parametrize(
    ("visible", "local_rank", "local_size", "hidden", "number"),
    [
        (4, 3, 4, False, 3),
        (8, 1, 2, False, 1),
        (4, 3, 4, True, 3),  # the same four hidden from nobody here
        (1, 0, 1, False, 0),
        (1, 3, 4, True, 0),  # one of its own
        (1, 0, 4, True, 0),
    ],
)
def test_the_device_of_a_process(visible: int, local_rank: int, local_size: int, hidden: bool, number: int) -> None:
    assert choose_device_index(visible, local_rank, local_size, hidden) == number


@pytest.mark.parametrize(
    ("visible", "hidden", "found"),
    [
        (1, False, "1 CUDA device; use at most 1, or placement.device"),
        (2, True, "2 CUDA devices; use at most 2, or .*only its own device"),
        (3, False, "3 CUDA devices; use at most 3, or"),
    ],
)
def test_too_few_devices_are_refused_on_all_ranks(visible: int, hidden: bool, found: str) -> None:
    problem = f"placement.processes: 4 processes on this host but only {found}"
    for local_rank in range(4):
        with pytest.raises(UsageError, match=problem):
            choose_device_index(visible, local_rank, 4, hidden)


@pytest.mark.parametrize(("visible", "numbers"), [(1, [0, 0, 0, 0]), (2, [0, 1, 0, 1]), (3, [0, 1, 2, 0])])
def test_processes_that_share_take_the_devices_in_turn(visible: int, numbers: list[int]) -> None:
    assert [
        choose_device_index(visible, local_rank, 4, False, allow_sharing=True) for local_rank in range(4)
    ] == numbers


def test_what_carries_tensors_follows_from_the_device() -> None:
    assert resolve_backend("auto", on_gpu=True) == resolve_backend("nccl", on_gpu=True) == "nccl"
    assert resolve_backend("auto", on_gpu=False) == resolve_backend("gloo", on_gpu=False) == "gloo"
    assert resolve_backend("gloo", on_gpu=True) == "gloo"
    with pytest.raises(UsageError, match=r"placement.backend: nccl does not support CPU tensors.*auto or gloo"):
        resolve_backend("nccl", on_gpu=False)


def test_ranks_with_one_device_between_them_are_found() -> None:
    assert find_shared_devices({0: "a", 1: "b", 2: "c"}) == []
    assert find_shared_devices({3: "a", 0: "b", 1: "a", 2: "b", 4: "c"}) == [[0, 2], [1, 3]]
