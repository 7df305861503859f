"""Evaluation counts every sample once, and its figures have the same bits in every world."""

from collections.abc import Iterator

import pytest
import torch
import worlds
from fakes import FakeEngine
from torch.nn import functional as F

from lockstep.comm.world import World
from lockstep.core.batch import Batch
from lockstep.core.mesh import DataRank
from lockstep.core.order import Steps
from lockstep.data.base import DataSet, NoTransforms
from lockstep.data.images.tensors import TensorSplit
from lockstep.data.loader import Loader
from lockstep.tasks.classification import Classification
from lockstep.training.evaluate import evaluate

pytestmark = [pytest.mark.slow("several ranks"), pytest.mark.worlds]
CLASSES = 7


def figures(world: World, samples: int, batch: int) -> tuple[dict[str, float], int]:
    """Evaluate outputs that are the samples themselves; return the figures and how many samples came by here."""
    generator = torch.Generator().manual_seed(samples)
    outputs = torch.randn(samples, CLASSES, generator=generator)
    targets = torch.randint(CLASSES, (samples,), generator=generator)
    targets[::5] = -100  # could not be read
    split = TensorSplit(outputs, targets)
    loader = Loader(
        DataSet(split, split),
        Steps(samples, 1, epochs=1),
        1,
        NoTransforms(),
        torch.device("cpu"),
        0,
        DataRank(world.rank, world.size),
    )
    seen = 0

    def counted() -> Iterator[tuple[int | None, Batch, int]]:
        nonlocal seen
        for number, fetched, weight in loader.iterate_validation_batches(batch):
            seen += weight
            yield number, fetched, weight

    found = evaluate(
        FakeEngine(), world, Classification(topk=(1, 5)), counted(), loader.count_validation_batches(batch)
    )
    assert found.seconds >= 0.0
    return {name: float(value) for name, value in found.sums.items()}, seen


@pytest.mark.parametrize(("samples", "batch"), [(1, 1), (10, 3), (101, 8), (64, 64), (3, 10)])
def test_every_sample_counts_once_in_every_world(samples: int, batch: int) -> None:
    [(alone, _)] = worlds.run(1, figures, samples, batch)
    assert alone["samples"] == samples
    assert alone["counted"] == samples - len(range(0, samples, 5))
    for size in (2, 3, 4):
        answers = worlds.run(size, figures, samples, batch)
        assert [found for found, _ in answers] == [alone] * size
        assert sum(seen for _, seen in answers) == samples


def test_figures_are_those_of_the_whole_split() -> None:
    generator = torch.Generator().manual_seed(101)
    outputs = torch.randn(101, CLASSES, generator=generator)
    targets = torch.randint(CLASSES, (101,), generator=generator)
    read = torch.arange(101) % 5 != 0
    [(found, _)] = worlds.run(1, figures, 101, 8)
    order = outputs[read].argsort(dim=1, descending=True)
    hits = order == targets[read][:, None]
    assert found["correct1"] == hits[:, :1].sum().item()
    assert found["correct5"] == hits[:, :5].sum().item()
    assert 0 < found["correct1"] < found["correct5"] < read.sum().item()
    expected = F.cross_entropy(outputs[read].double(), targets[read], reduction="sum")
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-6)
