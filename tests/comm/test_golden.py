"""Golden cases: right on gloo in every dtype, and a collective that is broken on one rank is named."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds

from lockstep.comm import golden
from lockstep.comm.golden import DTYPES, GoldenCase
from lockstep.comm.world import World

CPU = torch.device("cpu")


def tried(world: World) -> tuple[dict[str, Any], int]:
    steps = []
    found = golden.run_golden_cases(world, lambda: steps.append(0))
    return asdict(found), len(steps)


def tried_with_a_broken(world: World, name: str, broken_rank: int) -> list[str]:
    """Try while one rank's collective gives what it should, but for one element."""
    patch = pytest.MonkeyPatch()
    right = getattr(dist, name)

    def broken(tensor: Any, *args: Any) -> Any:
        work = right(tensor, *args)
        if world.rank == broken_rank:
            (tensor[-1] if isinstance(tensor, list) else tensor)[-1].add_(1)
        return work

    with patch.context() as patched:
        patched.setattr(dist, name, broken)
        return golden.run_golden_cases(world).wrong


def barrier_that_does_not_wait(world: World) -> list[str]:
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(dist, "barrier", lambda: None)
        found = golden.run_golden_cases(world).wrong
    dist.barrier()
    return found


@pytest.mark.worlds
@pytest.mark.parametrize("size", [2, 3])
def test_all_collectives_are_right_on_gloo(size: int) -> None:
    for found, steps in worlds.run(size, tried):
        assert found["wrong"] == []
        assert {text.partition(" of ")[0] for text in found["refused"]} <= {"all_to_all"}  # before torch 2.13
        assert found["tried"]["all_reduce"] == 2 * len(DTYPES) + 1
        assert {"barrier", "broadcast", "reduce", "scatter", "gather", "reduce_scatter"} < found["tried"].keys()
        assert {"all_gather", "all_to_all_single", "send/recv"} < found["tried"].keys()
        assert steps == sum(found["tried"].values()) + len(found["refused"])


@pytest.mark.worlds
@pytest.mark.parametrize(
    ("function", "named"),
    [
        ("all_reduce", "all_reduce"),
        ("all_gather", "all_gather"),
        ("broadcast", "broadcast"),
        ("scatter", "scatter"),
        ("reduce_scatter_tensor", "reduce_scatter"),
        ("all_to_all_single", "all_to_all_single"),
    ],
)
def test_a_broken_collective_is_named_on_its_rank(function: str, named: str) -> None:
    first, second, third = worlds.run(3, tried_with_a_broken, function, 1)
    assert first == third == []
    assert {text.partition(" of ")[0] for text in second} == {named}
    assert "1 of " in second[0]
    assert second[0].endswith("differ")


@pytest.mark.worlds
def test_a_barrier_that_does_not_wait_is_found() -> None:
    found = worlds.run(3, barrier_that_does_not_wait)
    assert any(text.startswith("barrier: left when ") for texts in found for text in texts)


def test_one_rank_has_nothing_to_try() -> None:
    from lockstep.common.rank import ALONE

    assert golden.run_golden_cases(World(ALONE, CPU)).tried == {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 100])
def test_sums_are_exact_in_every_dtype(dtype: torch.dtype, size: int) -> None:
    case = GoldenCase(0, size, dtype, 50, CPU)
    exact = torch.stack([each.to(torch.float64) for each in case.every()]).sum(0)
    assert torch.equal(case.sum().to(torch.float64), exact)


def test_what_each_sends_differs_by_rank_and_receiver() -> None:
    case = GoldenCase(0, 3, torch.float64, 50, CPU)
    assert not torch.equal(case.values(0), case.values(1))
    assert not torch.equal(case.values(0, to=1), case.values(0, to=2))
    assert not torch.equal(case.values(1), case.values(1).float().double())  # 32 bits would not do
