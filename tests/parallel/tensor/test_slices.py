"""A model whose chunks are shared by ranks has the bits of one process that computes them all."""

from dataclasses import replace
from typing import Any

import cut_models
import pytest
import toys
import worlds
from pairs import BEYOND, pairs
from same_bits import assert_resumed_bits, assert_same_bits
from toys import Case

from lockstep.comm.world import World
from lockstep.core.shard import Shard
from lockstep.errors import UsageError
from lockstep.parallel.tensor.slices import check_distributable, find_split_layers

NET = Case(model=cut_models.Net, chunks=4, plan=cut_models.PLAN)
CASES = {
    "sgd": NET,
    "three micro-batches": replace(NET, microbatches=3),
    "clipped, averaged": replace(NET, microbatches=6, clip=0.1, ema=True),
    "adamw, clipped": replace(NET, optimizer="adamw", clip=0.1),
    "lamb": replace(NET, optimizer="lamb", clip=1.0, ema=True),
    "lars, in two chunks": replace(NET, optimizer="lars", chunks=2),
    "bf16": replace(NET, precision="bf16", clip=0.5),
    "bf16-compute": replace(NET, precision="bf16-compute", clip=0.5, ema=True),
    "fp16, skipping": replace(NET, precision="fp16", initial_scale=2.0**20, optimizer="adamw"),
    "fp16-compute": replace(NET, precision="fp16-compute", optimizer="adamw", clip=0.5),
    "fp16-true": replace(NET, precision="fp16-true", static_scale=1.0, clip=0.5, ema=True),
    "recomputed": replace(NET, recompute=1),
    "frozen in part": replace(NET, freeze=("stem.*", "*.out.*", "*.gate.weight", "*.attention.norm.bias")),
    "one micro-batch": replace(NET, microbatches=1),
    "several losses": replace(NET, losses="two", clip=0.1),
}
SLICED = [("tensor", 2, ()), ("tensor", 4, (("replicate", 2),))]
OTHERWISE = [("tensor", 4, ()), ("ddp", 2, ()), ("zero1", 2, ()), ("zero3", 2, ()), ("pipeline", 2, ())]


MESHES = [
    ("mesh", 4, (("shard", 2), ("tensor", 2))),
    ("mesh", 4, (("pipe", 2), ("tensor", 2))),
    ("mesh", 4, (("replicate", 2), ("pipe", 2))),
    ("mesh", 8, (("replicate", 2), ("pipe", 2), ("tensor", 2))),
    ("mesh", 8, (("shard", 2), ("pipe", 2), ("tensor", 2))),
    ("mesh", 8, (("replicate", 2), ("shard", 2), ("tensor", 2))),
]
PLACED = [
    *pairs([name for name in CASES if name not in ("sgd", "one micro-batch")], SLICED),
    ("one micro-batch", SLICED[0]),
    *pairs(["clipped, averaged", "bf16-compute"], OTHERWISE),
    *pairs(["lamb", "fp16, skipping", "bf16-compute", "frozen in part"], MESHES),
]


@pytest.mark.worlds
@pytest.mark.parametrize("placed", SLICED, ids=str)
def test_plain_sgd_has_the_bits_of_one_process(placed: tuple[str, int, Any]) -> None:
    assert_same_bits(CASES["sgd"], placed)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize(("name", "placed"), PLACED)
def test_any_recipe_has_the_bits_of_one_process(name: str, placed: tuple[str, int, Any]) -> None:
    assert_same_bits(CASES[name], placed)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize(
    ("schedule", "beside"),
    [
        *pairs(["gpipe", "interleaved", "zero_bubble"], ["tensor", "shard"]),
        pytest.param("gpipe, recomputed", "tensor", marks=BEYOND),
        ("gpipe, recomputed", "shard"),
    ],
)
def test_the_schedule_of_its_pipelines_changes_no_bit(schedule: str, beside: str) -> None:
    name, _, recomputed = schedule.partition(", ")
    case = replace(CASES["clipped, averaged"], recompute=int(bool(recomputed)))
    assert_same_bits(case, ("mesh", 4, (("pipe", 2), (beside, 2), ("schedule", name))))


WAYS = [
    [("tensor", 2, ()), ("tensor", 4, (("replicate", 2),))],
    [("tensor", 4, ()), ("zero3", 3, ())],
    [("ddp", 3, ()), ("tensor", 2, ())],
    [("mesh", 4, (("pipe", 2), ("tensor", 2))), ("mesh", 4, (("shard", 2), ("tensor", 2)))],
]


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize(("name", "ways"), pairs(["lamb", "fp16, skipping", "bf16-compute"], WAYS))
def test_going_on_elsewhere_gives_the_same_bits(name: str, ways: list[Any]) -> None:
    assert_resumed_bits(replace(CASES[name], samples=(12, 12, 7, 3, 12, 12)), *ways, at=3)


def _observed(world: World, case: Case) -> dict[str, list[float]]:
    engine = toys.engine(world, case)
    step, *_ = next(toys.steps(case))
    sums = engine.forward_backward(toys.share(world, case, step), step, observe=True).of_task
    engine.close()
    return {name: each.tolist() for name, each in sums.items()}


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("placed", [SLICED[0], *MESHES[:2]])
def test_what_all_slices_know_is_counted_once(placed: tuple[str, int, Any]) -> None:
    strategy, size, options = placed
    [alone] = worlds.run(1, _observed, NET)
    assert alone["counted"] == 12
    assert worlds.run(size, _observed, replace(NET, strategy=strategy, options=options)) == [alone] * size


def sizes_of(world: World, case: Case) -> dict[str, tuple[int, int]]:
    """Return of each trained tensor how much this rank has, and how much there is."""
    engine = toys.engine(world, case)
    held = engine.state().model.items()
    return {
        name: (each.tensor.numel() if isinstance(each, Shard) else each.numel(), each.shape.numel())
        for name, each in held
    }


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_a_rank_holds_its_chunks_alone() -> None:
    for sizes in worlds.run(2, sizes_of, replace(NET, strategy="tensor")):
        assert sizes["blocks.1.attention.queries_keys_values.weight"] == (3 * 12 * 11 // 2, 3 * 12 * 11)
        assert sizes["blocks.0.attention.queries_keys_values.bias"] == (18, 36)
        assert sizes["blocks.0.down.weight"] == (110, 220)
        assert sizes["blocks.0.attention.out.bias"] == (11, 11)
        assert sizes["stem.weight"][0] == sizes["stem.weight"][1]


@pytest.mark.parametrize(
    ("chunks", "ranks", "problem"),
    [
        (4, 3, "3 processes cannot share the 4 chunks of blocks.0.attention.queries_keys_values; use 1, 2, 4"),
        (1, 2, "recipe.model.chunks is 1, so there is nothing to share; set it to a multiple of 2"),
    ],
)
def test_ranks_that_cannot_share_are_refused(chunks: int, ranks: int, problem: str) -> None:
    layers = find_split_layers(toys.build(replace(NET, chunks=chunks)))
    check_distributable(layers, 1)
    with pytest.raises(UsageError, match=problem):
        check_distributable(layers, ranks)
