"""Torch's pipelines, which ours are measured beside, do the same work: the gradients of the same stages."""

import pytest
import torch
import worlds
from torch import nn
from torch.nn import functional as F

from benchmarks.learners import MODELS, Work
from benchmarks.pipelines import SCHEDULES, pipelined
from lockstep.comm.world import World

pytestmark = pytest.mark.slow("it is of torch's pipelines, which ours are measured beside")
WORK = Work("ViT-Tiny", "AdamW", samples=2, microbatches=4)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    batches = [WORK.batch(index) for index in range(WORK.microbatches)]
    return torch.cat([each.batch[0] for each in batches]), torch.cat([each.batch[1] for each in batches])


def _norms(model: nn.Module) -> list[float]:
    return [parameter.grad.norm().item() for parameter in model.parameters() if parameter.grad is not None]


def norms(world: World, schedule: str) -> list[float]:
    part, run = pipelined(schedule, WORK.build(), WORK.microbatches, world.rank, world.size)
    run(*_batch())
    return _norms(part)


@pytest.mark.worlds
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_by_hand_computes_the_gradients_of_the_whole(schedule: str) -> None:
    model = WORK.build().train()
    inputs, targets = _batch()
    F.cross_entropy(model(inputs), targets).backward()
    parts = worlds.run(2, norms, schedule)
    assert sorted([*parts[0], *parts[1]]) == pytest.approx(sorted(_norms(model)), rel=1e-3)


def test_the_models_have_ten_classes() -> None:
    for build in MODELS.values():
        assert build().eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
