"""A thumbnail shows the pixels that the data gave, no others."""

import pytest
import torch
from looked import pixels

from lockstep.inference.thumbnails import are_pictures, thumbnails


@pytest.mark.parametrize("channels", [1, 3])
def test_each_pixel_of_a_small_picture_is_a_square_of_its_value(channels: int) -> None:
    given = torch.randint(0, 256, (2, channels, 8, 6), generator=torch.Generator().manual_seed(0)).byte()
    for one, source in zip(given, thumbnails(given), strict=True):
        shown = pixels(source)
        assert shown.shape[:2] == (8 * 14, 6 * 14)
        assert torch.equal(shown[7::14, 7::14], one[0] if channels == 1 else one.permute(1, 2, 0))


def test_a_large_picture_is_made_smaller() -> None:
    [source] = thumbnails(torch.full((1, 3, 300, 600), 77, dtype=torch.uint8))
    shown = pixels(source)
    assert shown.shape == (56, 112, 3)
    assert shown.unique().tolist() == [77]


def test_floats_are_stretched_from_black_to_white() -> None:
    values = torch.tensor([[-2.0, 0.0], [torch.nan, 2.0]])
    shown = pixels(thumbnails(values[None, None])[0])
    assert shown[::56, ::56].tolist() == [[0, 128], [128, 255]]
    assert pixels(thumbnails(torch.full((1, 1, 2, 2), 3.5))[0]).unique().tolist() == [0]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((5, 3, 8, 8), True), ((5, 1, 8, 8), True), ((5, 4, 8, 8), False), ((5, 1, 40), False), ((5, 3, 1, 9), False)],
)
def test_what_is_a_picture(shape: tuple[int, ...], expected: bool) -> None:
    assert are_pictures(torch.zeros(shape)) == expected
