"""The shipped digits: their number, split, scale and figures."""

import numpy as np
import pytest
import torch

from lockstep.data.images.digits import load_digits
from lockstep.data.sources import count_training_samples


def test_the_split_is_complete_and_fixed() -> None:
    data = load_digits()
    assert (len(data.train), len(data.validation)) == (1437, 360)
    assert len(data.train) == count_training_samples("digits", "", {})
    _, first = data.validation.fetch(np.arange(6), None)
    # Samples 0, 5, 10, ... of the original, which begins 0 1 2 ... 9 0 1 2 ... 9.
    assert first.tolist() == [0, 5, 0, 5, 0, 5]
    _, first = data.train.fetch(np.arange(8), None)
    assert first.tolist() == [1, 2, 3, 4, 6, 7, 8, 9]


def test_pixels_are_counts_scaled_to_bytes() -> None:
    images, targets = load_digits().validation.fetch(np.arange(1), None)
    assert images.dtype == torch.uint8
    assert targets.dtype == torch.int64
    assert images.shape == (1, *load_digits().facts["shape"]) == (1, 1, 8, 8)
    assert images[0, 0, 0].tolist() == [0, 0, 80, 208, 144, 16, 0, 0]  # the original's 0 0 5 13 9 1 0 0
    assert int(images.max()) == 240  # its 15; the 16 of others stays a byte
    assert set(load_digits().train.fetch(np.arange(1437), None)[0].unique().tolist()) == {*range(0, 256, 16), 255}


def test_mean_and_std_are_those_of_the_training_part() -> None:
    data = load_digits()
    pixels = data.train.fetch(np.arange(1437), None)[0].double() / 255
    assert data.facts["mean"] == pytest.approx([pixels.mean().item()], abs=5e-5)
    assert data.facts["std"] == pytest.approx([pixels.std().item()], abs=1e-4)


def test_every_class_is_in_both_parts() -> None:
    data = load_digits()
    for split in (data.train, data.validation):
        _, targets = split.fetch(np.arange(len(split)), None)
        assert targets.unique().tolist() == list(range(len(data.facts["classes"])))
