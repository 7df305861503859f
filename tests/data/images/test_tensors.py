"""Fetching from memory: the samples asked for, in the order asked."""

import numpy as np
import torch

from lockstep.data.base import Split
from lockstep.data.images.tensors import TensorSplit


def test_fetch_returns_the_samples_in_order() -> None:
    images = torch.arange(5, dtype=torch.uint8).reshape(5, 1, 1, 1).expand(5, 2, 1, 3).contiguous()
    split: Split = TensorSplit(images, torch.arange(5) * 10)
    indices = np.array([3, 0, 3])
    indices.flags.writeable = False
    fetched, targets = split.fetch(indices, 7)
    assert fetched.shape == (3, 2, 1, 3)
    assert fetched[:, 0, 0, 0].tolist() == [3, 0, 3]
    assert targets.tolist() == [30, 0, 30]
    assert len(split) == 5
    assert split.in_memory


def test_a_fetched_batch_is_a_copy() -> None:
    split = TensorSplit(torch.zeros(2, 1, 1, 1, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    split.fetch(np.array([0, 1]), None)[0].fill_(9)
    assert split.images.sum() == 0


def test_no_samples_keep_their_shape() -> None:
    split = TensorSplit(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    fetched, targets = split.fetch(np.array([], np.int64), None)
    assert fetched.shape == (0, 3, 4, 4)
    assert targets.shape == (0,)
