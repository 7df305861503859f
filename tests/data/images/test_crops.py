"""Crops: inside the image, of the asked area, and torchvision's own choices given the same random numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import functional

from lockstep.data.images.crops import (
    NUM_DRAWS,
    compute_center_crop_box,
    compute_random_crop_box,
    compute_resized_shape,
)

sizes = st.integers(1, 700)
draws = st.lists(st.floats(0, 1, exclude_max=True), min_size=NUM_DRAWS, max_size=NUM_DRAWS)


@given(sizes, sizes, draws, st.floats(0.01, 1))
def test_a_crop_lies_in_the_image(height: int, width: int, drawn: list[float], least: float) -> None:
    top, left, high, wide = compute_random_crop_box(height, width, (least, 1.0), drawn)
    assert 0 <= top <= top + high <= height
    assert 0 <= left <= left + wide <= width
    assert high > 0
    assert wide > 0


def test_area_and_aspect_follow_from_the_first_try() -> None:
    drawn = [0.5, 0.5, *[0.0] * (NUM_DRAWS - 4), 0.25, 0.999]
    # A share of 0.08 + 0.5 * 0.92 = 0.54 of the area; the middle of log(3/4)..log(4/3) is a square.
    side = round(math.sqrt(0.54 * 400 * 600))
    assert compute_random_crop_box(400, 600, (0.08, 1.0), drawn) == (
        int(0.25 * (400 - side + 1)),
        int(0.999 * (600 - side + 1)),
        side,
        side,
    )


@pytest.mark.parametrize("misses", [2, 9])
def test_what_does_not_fit_is_tried_again_up_to_a_tenth_time(misses: int) -> None:
    whole = [0.999999, 0.999999]  # all of the area at an aspect of 4/3 is wider than a square image
    small = [0.0, 0.5]
    drawn = [*whole * misses, *small, *[0.0] * 2 * (10 - misses)]
    assert len(drawn) == NUM_DRAWS
    assert compute_random_crop_box(100, 100, (0.25, 1.0), drawn) == (0, 0, 50, 50)


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [
        (100, 1000, (0, 433, 100, 133)),
        (1000, 100, (433, 0, 133, 100)),
        (100, 110, (0, 0, 100, 110)),
    ],
)
def test_ten_misses_give_the_largest_center(height: int, width: int, box: tuple[int, ...]) -> None:
    draw = [0.999999, 0.999999 if height >= width else 0.0]
    assert compute_random_crop_box(height, width, (1.0, 1.0), [*draw * 10, 0.0, 0.0]) == box


@given(sizes, sizes, st.integers(1, 300), st.integers(0, 50))
def test_validation_resizes_and_cuts_as_torchvision(height: int, width: int, size: int, more: int) -> None:
    output_size = functional._compute_resized_output_size((height, width), [size + more])
    assert [*compute_resized_shape(height, width, size + more)] == output_size


@given(st.integers(1, 60), st.integers(0, 30), st.integers(0, 30))
def test_the_center_is_torchvisions(size: int, above: int, beside: int) -> None:
    height, width = size + above, size + beside
    image = torch.arange(height * width).reshape(1, height, width)
    top, left, high, wide = compute_center_crop_box(height, width, size)
    mine = image[:, top : top + high, left : left + wide]
    assert torch.equal(mine, functional.center_crop(image, [size, size]))
