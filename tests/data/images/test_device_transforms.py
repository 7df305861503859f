from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms import functional as reference

from lockstep.core import random
from lockstep.data.images.device_transforms import (
    ImageTransforms,
    compute_crop_positions,
    compute_normalization_constants,
    crop_and_flip,
    mix_samples,
    normalize,
)
from lockstep.errors import UsageError
from lockstep.tasks.classification import SKIPPED

CPU = torch.device("cpu")


def _images(count: int, channels: int = 3, height: int = 6, width: int = 5) -> Tensor:
    shape = (count, channels, height, width)
    return torch.from_numpy(np.random.default_rng(0).integers(1, 256, shape, dtype=np.uint8))


def augment(images: Tensor, draws: NDArray[np.float64], padding: int, flip: bool) -> Tensor:
    return crop_and_flip(images, compute_crop_positions(draws, images.shape, padding, flip), padding, flip)


def _draws(count: int, seed: int = 0) -> NDArray[np.float64]:
    return random.draw_uniform(random.make_key(random.AUGMENT, seed, 1), np.arange(count), 3)


def _by_torchvision(image: Tensor, draws: Sequence[float], padding: int, flip: bool) -> Tensor:
    top, left = (int(draw * (2 * padding + 1)) for draw in draws[:2])
    cropped = reference.crop(reference.pad(image, [padding] * 4), top, left, *image.shape[-2:])
    return reference.hflip(cropped) if flip and draws[2] < 0.5 else cropped


@given(
    count=st.integers(1, 7),
    channels=st.integers(1, 3),
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    padding=st.integers(0, 4),
    flip=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(deadline=None)
def test_augment_is_torchvisions_pad_crop_and_flip_of_each_image(
    count: int, channels: int, height: int, width: int, padding: int, flip: bool, seed: int
) -> None:
    images, draws = _images(count, channels, height, width), _draws(count, seed)
    expected = [_by_torchvision(image, draw, padding, flip) for image, draw in zip(images, draws.tolist(), strict=True)]
    assert torch.equal(augment(images, draws, padding, flip), torch.stack(expected))


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_large_images_are_flipped_like_small_ones(padding: int, order: torch.memory_format) -> None:
    images, draws = _images(5, height=160, width=150).contiguous(memory_format=order), _draws(5)
    expected = [_by_torchvision(image, draw, padding, True) for image, draw in zip(images, draws.tolist(), strict=True)]
    found = augment(images, draws, padding, True)
    assert torch.equal(found, torch.stack(expected))
    assert found.is_contiguous()
    assert found.data_ptr() != images.data_ptr()


@pytest.mark.parametrize(("count", "side"), [(30, 224), (2, 1300), (1400, 32)])
def test_large_batches_are_normalized_like_their_images(count: int, side: int) -> None:
    images = _images(count, height=side, width=side)
    constants = compute_normalization_constants((0.5, 0.4, 0.3), (0.2, 0.3, 0.1), CPU)
    found = normalize(images, *constants)
    assert found.dtype == torch.float32
    for image, source in zip(found, images, strict=True):
        assert torch.equal(image[:, :16], normalize(source[None, :, :16], *constants)[0])


def test_an_image_becomes_the_same_alone_and_in_any_batch() -> None:
    images, draws = _images(33, height=32, width=32), _draws(33)
    scale, shift = compute_normalization_constants((0.5, 0.4, 0.3), (0.2, 0.3, 0.1), CPU)

    def finished(chosen: slice) -> Tensor:
        return normalize(augment(images[chosen], draws[chosen], 4, True), scale, shift)

    whole = finished(slice(None))
    assert torch.equal(whole, torch.cat([finished(slice(place, place + 1)) for place in range(33)]))
    assert torch.equal(whole[5:18], finished(slice(5, 18)))


def test_every_crop_and_both_sides_occur() -> None:
    ramp = torch.arange(1, 26, dtype=torch.uint8).view(1, 1, 5, 5).expand(2000, 1, 5, 5)
    seen = augment(ramp, _draws(2000), 1, True).flatten(1).unique(dim=0)
    assert len(seen) == 3 * 3 * 2


def test_images_of_another_memory_order_come_out_the_same() -> None:
    images, draws = _images(4), _draws(4)
    for padding, flip in ((0, True), (2, False), (2, True)):
        last = images.contiguous(memory_format=torch.channels_last)
        assert torch.equal(augment(last, draws, padding, flip), augment(images, draws, padding, flip))


def test_normalize_is_within_rounding_of_the_formula() -> None:
    images, mean, std = _images(2), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    exact = (images.double() / 255 - torch.tensor(mean).double()[:, None, None]) / torch.tensor(std).double()[
        :, None, None
    ]
    found = normalize(images, *compute_normalization_constants(mean, std, CPU))
    assert found.dtype == torch.float32
    # Three numbers of at most 4.5 are each rounded to 24 bits.
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=3 * 4.5 * 2**-24)


def test_float_images_are_not_divided_by_255() -> None:
    images = _images(2)
    floats = images.float() / 255
    transforms = ImageTransforms(10, mean=(0.5,) * 3, std=(0.25,) * 3)
    before = floats.clone()
    found, _ = transforms.transform_evaluation_batch((floats, torch.zeros(2)))
    assert torch.equal(found, (before - 0.5) / 0.25)
    assert torch.equal(floats, before)  # a batch may be a view of the user's dataset
    of_bytes, _ = transforms.transform_evaluation_batch((images, torch.zeros(2)))
    torch.testing.assert_close(found, of_bytes)


@pytest.mark.parametrize("settings", [{"flip": True}, {"crop_padding": 1}])
@pytest.mark.parametrize("shape", [(6, 5), (3, 4)])  # masks; a number of boxes
def test_images_are_not_moved_away_from_targets_that_have_positions(settings: Any, shape: tuple[int, ...]) -> None:
    batch = _images(4), torch.zeros(4, *shape, dtype=torch.int64)
    ImageTransforms(10).transform_training_batch(batch, 0, 0)
    with pytest.raises(UsageError, match=r"^recipe.data.augment: crop_padding and flip would move .*; remove crop_pad"):
        ImageTransforms(10, **settings).transform_training_batch(batch, 0, 0)


def test_mixup_blends_neighbors_and_their_classes_by_one_share() -> None:
    inputs, targets = torch.eye(4)[:, :, None, None], torch.tensor([0, 1, 2, 3])
    mixed, weights = mix_samples(inputs, targets, 4, 1.0, 0.0, 1.0, key=1)
    share = weights[0, 0].item()
    assert 0 < share < 1
    torch.testing.assert_close(weights.sum(1), torch.ones(4))
    assert torch.equal(mixed[:, :, 0, 0], weights)
    torch.testing.assert_close(weights, torch.eye(4) * share + torch.eye(4).roll(1, 0) * (1 - share))


@pytest.mark.parametrize("key", range(20))
def test_cutmix_weighs_classes_by_the_area_it_really_cut(key: int) -> None:
    inputs = torch.arange(1.0, 4.0)[:, None, None, None].expand(3, 2, 8, 9)
    mixed, weights = mix_samples(inputs, torch.tensor([0, 1, 2]), 3, 0.0, 1.0, 1.0, key)
    kept = (mixed == inputs).double().mean((1, 2, 3))
    torch.testing.assert_close(weights.diagonal().double(), kept, rtol=0, atol=1e-6)
    assert torch.equal(inputs, torch.arange(1.0, 4.0)[:, None, None, None].expand(3, 2, 8, 9))


def test_mixing_follows_its_key_alone_and_its_probability() -> None:
    inputs, targets = torch.rand(3, 1, 4, 4), torch.tensor([0, 1, 2])
    first, again = (mix_samples(inputs, targets, 3, 0.4, 1.0, 1.0, key=7) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    mixed = sum(not torch.equal(mix_samples(inputs, targets, 3, 1.0, 0.0, 0.25, key)[0], inputs) for key in range(400))
    assert 70 <= mixed <= 130  # 100 expected; 30 is 3.5 standard deviations
    unmixed, weights = mix_samples(inputs, targets, 3, 1.0, 1.0, 0.0, key=7)
    assert torch.equal(unmixed, inputs)
    assert torch.equal(weights, torch.eye(3))


def test_a_skipped_sample_weighs_nothing() -> None:
    targets = torch.tensor([1, SKIPPED])
    _, weights = mix_samples(torch.zeros(2, 1, 4, 4), targets, 3, 0.0, 1.0, 0.0, key=0)
    assert weights.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
