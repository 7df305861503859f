"""What the options of a pipeline may be together, and which micro-batches a rank has."""

import re
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from lockstep.core.mesh import DataRank
from lockstep.errors import UsageError
from lockstep.strategies.pipeline import Strategy


@pytest.mark.parametrize(
    ("options", "processes", "microbatches"),
    [
        ({}, 1, 1),
        ({}, 8, 2),  # fewer micro-batches than stages: slow, not wrong
        ({"schedule": "interleaved"}, 2, 4),
        ({"schedule": "zero_bubble", "stages_per_rank": 3}, 4, 4),
        ({"replicate": 2}, 4, 2),
        ({"replicate": 2, "shard": 2}, 8, 4),
        ({"cut": ("layer2", "layer3", "layer4")}, 4, 4),
        ({"cut": ("layer2", "layer3", "layer4"), "schedule": "interleaved"}, 2, 4),
        ({"cut": ("layer3",), "replicate": 2}, 4, 4),
    ],
)
def test_what_fits_is_taken(options: dict[str, object], processes: int, microbatches: int) -> None:
    made = TypeAdapter(Strategy).validate_python(options)
    made.check(processes, microbatches)


@pytest.mark.parametrize(
    ("options", "processes", "microbatches", "said"),
    [
        ({"stages_per_rank": 2}, 2, 4, "schedule 1f1b requires stages_per_rank=1, got 2; use schedule interleaved"),
        ({"schedule": "gpipe", "stages_per_rank": 3}, 2, 4, "schedule gpipe requires stages_per_rank=1, got 3"),
        ({"schedule": "interleaved", "stages_per_rank": 1}, 2, 4, "interleaved requires stages_per_rank of 2 or more"),
        ({"replicate": 4}, 6, 8, "replicate=4 does not divide 6 processes; use 1, 2, 3, 6"),
        ({"replicate": 4}, 4, 3, "replicate=4 requires at least 4 micro-batches, got 3; use at most 3"),
        ({"shard": 2}, 3, 8, "strategy pipeline: shard=2 does not divide 3 processes; use 1, 3"),
        ({"replicate": 2, "shard": 2}, 6, 8, "replicate=2 x shard=2 does not divide 6 processes; use 1, 2, 3, 6"),
        ({"replicate": 2, "shard": 2}, 4, 3, "replicate=2 x shard=2 requires at least 4 micro-batches, got 3"),
        ({"cut": ("layer2",)}, 3, 4, "must be 2 for 3 stages (1 for each process of a pipeline), got 1"),
        ({"cut": ("a", "b")}, 2, 4, "must be 1 for 2 stages (1 for each process of a pipeline), got 2"),
        ({"cut": ("a",), "schedule": "interleaved"}, 2, 4, "for 4 stages (2 for each process"),
    ],
)
def test_what_does_not_fit_says_so(options: dict[str, object], processes: int, microbatches: int, said: str) -> None:
    made = TypeAdapter(Strategy).validate_python(options)
    with pytest.raises(UsageError, match=re.escape(said)):
        made.check(processes, microbatches)


@pytest.mark.parametrize("options", [{"schedule": "fast"}, {"stages_per_rank": 0}, {"replicate": 0}, {"cut": "layer2"}])
def test_options_are_of_their_kind(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Strategy).validate_python(options)


def test_the_ranks_of_a_pipeline_have_the_same_micro_batches() -> None:
    ranks = [Strategy(replicate=2).mesh(4).get_data_rank(rank) for rank in range(4)]
    assert ranks == [
        DataRank(0, 2),
        DataRank(0, 2, reports_results=False),
        DataRank(1, 2),
        DataRank(1, 2, reports_results=False),
    ]
    assert [rank.get_microbatches(5) for rank in ranks[1:3]] == [
        [(0, False), (1, False), (2, False)],
        [(3, False), (4, False)],
    ]


def chain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))


def reading() -> nn.Module:
    """Built from values, which the meta device has not."""
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(int(torch.ones(3).sum()))])


def _warning(build: Callable[[], nn.Module]) -> nn.Module:
    warnings.warn("the real build says it again", stacklevel=1)
    return build()


def test_a_model_is_checked_before_any_process_starts() -> None:
    sample = (torch.empty(2, 4, device="meta"),)
    for build in (chain, reading):
        Strategy().check_model(build, sample, 3)
        Strategy(replicate=2).check_model(build, sample, 6)
        with pytest.raises(UsageError, match="cannot be split into 4 stages"):
            Strategy().check_model(build, sample, 4)
        with pytest.raises(UsageError, match="cannot be split into 6 stages"):
            Strategy(schedule="interleaved").check_model(build, sample, 3)
        warned = partial(_warning, build)
        Strategy().check_model(warned, sample, 3)
    tokens = (torch.empty(2, 5, dtype=torch.int64, device="meta"),)
    Strategy().check_model(lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3)), tokens, 2)
    with pytest.raises(UsageError, match="the model has no module 9"):
        Strategy(cut=("9",)).check_model(chain, sample, 2)
