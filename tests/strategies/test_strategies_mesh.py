"""The lengths of a mesh give its processes, and what does not fit is refused."""

import re
from functools import partial

import pytest
from torch import nn

from lockstep.core.mesh import Mesh
from lockstep.errors import UsageError
from lockstep.models.gpt import gpt
from lockstep.parallel.tensor.built_in import get_built_in_plan
from lockstep.parallel.tensor.plan import split_into_chunks
from lockstep.strategies.mesh import Strategy


@pytest.mark.parametrize(
    ("strategy", "processes", "problem"),
    [
        (Strategy(pipe=2, tensor=2), 6, "got 6; change a length, or don't set replicate and use a multiple of 4"),
        (Strategy(replicate=1, tensor=2), 4, "strategy mesh: replicate=1 x tensor=2 is 2 processes, got 4"),
        (Strategy(replicate=2, shard=3), 6, "6 processes but only 4 micro-batches"),
        (Strategy(expert=2, tensor=2), 4, "expert=2 is only supported with replicate, not with tensor=2; don't set"),
        (Strategy(shard=2, schedule="gpipe"), 2, "schedule and stages_per_rank require pipe of 2 or more, got pipe=1"),
        (Strategy(pipe=2, stages_per_rank=2), 2, "strategy mesh: schedule 1f1b requires stages_per_rank=1, got 2"),
        (
            Strategy(pipe=2, schedule="interleaved", cut=("a",)),
            2,
            "must be 3 for 4 stages (2 for each process of a pipeline)",
        ),
        (Strategy(expert=2, context=2), 4, "expert=2 is only supported with replicate, not with context=2"),
        (Strategy(tensor=2, shard=2, sequence_parallel=True), 4, "and context; remove shard=2, or don't set sequence"),
        (Strategy(context=2, sequence_parallel=True), 4, "set tensor to 2 or more, or don't set sequence_parallel"),
        (Strategy(replicate=2, expert=3), 6, "6 processes but only 4 micro-batches"),
        (Strategy(pipe=3, cut=("a",)), 3, "must be 2 for 3 stages (1 for each process of a pipeline), got 1; list"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(strategy: Strategy, processes: int, problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        strategy.check(processes, 4)


MESHES = [
    Strategy(replicate=2, pipe=2, shard=2, tensor=2),
    Strategy(shard=2, tensor=2),
    Strategy(replicate=3, tensor=2),
    Strategy(pipe=4),
    Strategy(),
]


def _at(coordinate: Mesh) -> tuple[int, int]:
    return coordinate.pipe, coordinate.tensor


@pytest.mark.parametrize("strategy", MESHES)
@pytest.mark.parametrize("leaves", [1, 3, 8])
def test_each_slice_of_each_stage_has_all_micro_batches_once(strategy: Strategy, leaves: int) -> None:
    processes = (strategy.replicate or 1) * strategy.pipe * strategy.shard * strategy.tensor
    strategy.check(processes, 8)
    mesh = strategy.mesh(processes)
    for pipe in range(strategy.pipe):
        for tensor in range(strategy.tensor):
            ranks = [rank for rank in range(processes) if _at(mesh.get_coordinates(rank)) == (pipe, tensor)]
            dealt = [
                index
                for rank in ranks
                for index, dummy in mesh.get_data_rank(rank).get_microbatches(leaves)
                if not dummy
            ]
            assert sorted(dealt) == list(range(leaves))


def test_replicas_are_what_the_other_lengths_leave() -> None:
    assert Strategy(pipe=2, tensor=2).mesh(8) == Mesh(replicate=2, pipe=2, tensor=2)
    assert Strategy(expert=2).mesh(6) == Mesh(replicate=3, expert=2)
    assert Strategy(pipe=2, shard=2, context=2).mesh(8) == Mesh(replicate=2, pipe=2, context=2)
    assert Strategy(shard=2, context=2).mesh(8) == Mesh(replicate=2, shard=2, context=2)
    assert Strategy().mesh(3) == Mesh(replicate=3)


def test_slices_are_next_to_each_other() -> None:
    for strategy in (Strategy(replicate=2, pipe=2, tensor=2), Strategy(shard=2, context=2, tensor=2)):
        assert strategy.mesh(8).get_groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]


def _gpt(chunks: int) -> nn.Module:
    model = gpt(vocabulary=20, context=8, layers=2, heads=4, width=16)
    if chunks > 1:
        split_into_chunks(model, get_built_in_plan(model), chunks)
    return model


def test_a_model_is_cut_both_ways_before_anything_starts() -> None:
    Strategy(pipe=2, tensor=2).check_model(partial(_gpt, 4), None, 4)
    with pytest.raises(UsageError, match="3 processes cannot share the 4 chunks"):
        Strategy(tensor=3).check_model(partial(_gpt, 4), None, 3)
    with pytest.raises(UsageError, match="strategy mesh: found no known experts in the model"):
        Strategy(expert=2).check_model(partial(_gpt, 4), None, 2)
    with pytest.raises(UsageError, match="strategy pipeline: "):
        Strategy(pipe=40).check_model(partial(_gpt, 1), None, 40)
