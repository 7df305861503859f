"""The loss by position: cross entropies added by hand, of sequences of several lengths and of long ones."""

import math

import pytest
import torch
from looked import evaluated
from torch.nn import functional as F

from lockstep.inference.perplexity import compute_loss_by_position
from lockstep.tasks.language import Language

TASK = Language(vocabulary=5)


def test_losses_are_averaged_over_what_counts_at_each_position() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 5, generator=generator)
    targets = torch.randint(5, (4, 6), generator=generator)
    targets[3, 4:] = TASK.ignore
    by_hand = F.cross_entropy(logits.double().transpose(1, 2), targets, reduction="none")
    shorter = evaluated((targets, targets[:3, :3]), logits[:3, :3])  # than what follows
    line = compute_loss_by_position(TASK, [shorter, evaluated((targets, targets[3:]), logits[3:])])
    expected = [by_hand[:, place].mean() for place in range(3)] + [by_hand[3, 3]]
    assert [place for place, _ in line] == [1, 2, 3, 4]
    assert [loss for _, loss in line] == pytest.approx([float(each) for each in expected], rel=1e-6)


def test_of_many_positions_stretches_are_averaged() -> None:
    logits = torch.zeros(1, 1001, 5)
    logits[0, 500:, 0] = 1.0
    targets = torch.zeros(1, 1001, dtype=torch.int64)
    line = compute_loss_by_position(TASK, [evaluated((targets, targets), logits)])
    assert len(line) == 251
    assert (line[0][0], line[-1][0]) == (2.5, 1001)
    assert line[0][1] == pytest.approx(math.log(5))
    assert line[-1][1] == pytest.approx(math.log(math.e + 4) - 1)
