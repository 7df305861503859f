"""Synthetic images: fixed bits, any shape, parts that differ, classes that can be told apart."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.base import DataSet
from lockstep.data.images import synthetic as module
from lockstep.data.images.synthetic import make_synthetic_dataset


def _small() -> DataSet:
    return make_synthetic_dataset(image_size=12, samples=90, validation_samples=30, classes=3, channels=2)


def _everything(data: DataSet) -> tuple[torch.Tensor, torch.Tensor]:
    return data.train.fetch(np.arange(len(data.train)), None)


def test_the_bits_are_fixed() -> None:
    images, _ = _everything(_small())
    digest = hashlib.sha256(images.numpy().tobytes()).hexdigest()
    assert digest == "4652231f3cf6cd316fd453010b202f9ae6cb1a47b12d6bdb719c57b79b7c9ebf"


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(0, 7), st.integers(0, 7), st.integers(1, 5), st.integers(1, 4))
def test_every_shape(size: int, samples: int, validation_samples: int, classes: int, channels: int) -> None:
    data = make_synthetic_dataset(
        image_size=size,
        samples=samples,
        validation_samples=validation_samples,
        classes=classes,
        channels=channels,
    )
    assert (len(data.train), len(data.validation), len(data.facts["classes"])) == (
        samples,
        validation_samples,
        classes,
    )
    images, targets = _everything(data)
    assert images.shape == (samples, *data.facts["shape"]) == (samples, channels, size, size)
    assert images.dtype == torch.uint8
    assert targets.tolist() == [number % classes for number in range(samples)]
    assert len(data.facts["mean"]) == channels


def test_noise_made_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = _everything(_small())
    monkeypatch.setattr(module, "_BLOCK_BYTES", 7 * 2 * 12 * 12)
    blocks, _ = _everything(_small())
    assert torch.equal(whole, blocks)


def test_a_sample_does_not_depend_on_how_many_there_are() -> None:
    fewer = make_synthetic_dataset(image_size=12, samples=10, validation_samples=5, classes=3, channels=2)
    assert torch.equal(_everything(fewer)[0], _everything(_small())[0][:10])


def test_no_image_is_twice_there() -> None:
    data = _small()
    images = torch.cat([_everything(data)[0], data.validation.fetch(np.arange(30), None)[0]])
    assert len(images.flatten(1).unique(dim=0)) == 120


def test_the_nearest_class_mean_of_training_classifies_validation() -> None:
    data = _small()
    images, targets = _everything(data)
    means = torch.stack([images[targets == number].double().mean(0) for number in range(3)])
    seen, labels = data.validation.fetch(np.arange(30), None)
    distances = (seen.double()[:, None] - means).square().flatten(2).sum(2)
    assert (distances.argmin(1) == labels).double().mean() >= 0.9


def test_figures_are_near_those_of_the_pixels() -> None:
    data = make_synthetic_dataset(image_size=8, samples=400, validation_samples=0, classes=50, channels=3)
    pixels = _everything(data)[0].double() / 255
    assert data.facts["mean"] == pytest.approx(pixels.mean((0, 2, 3)).tolist(), abs=0.02)
    assert data.facts["std"] == pytest.approx(pixels.std((0, 2, 3)).tolist(), abs=0.02)
