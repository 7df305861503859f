"""Dark digits on white paper are told from light digits on black, and no picture that is as it should be is."""

import pytest
import torch
from torch import Tensor

from lockstep.data.images.digits import load_digits
from lockstep.inference.polarity import Polarity, describe_inverted, find_polarity


def found(polarity: Polarity | None, images: Tensor) -> list[float]:
    assert polarity is not None
    measured = [polarity.measure_inverted(image) for image in images]
    return [brightness for brightness in measured if brightness is not None]


def test_every_digit_is_recognized_in_both_polarities() -> None:
    data = load_digits()
    images = torch.cat([data.train.images, data.validation.images])
    polarity = find_polarity(data.facts["mean"], data.facts["std"])
    assert found(polarity, images) == []
    assert len(found(polarity, 255 - images)) == len(images)
    on_paper = Polarity(1 - data.facts["mean"][0], dark_background=False)
    assert find_polarity([on_paper.mean], data.facts["std"]) == on_paper
    assert found(on_paper, 255 - images) == []
    assert len(found(on_paper, images)) == len(images)


def test_a_light_object_that_fills_a_dark_picture_is_no_inverted_picture() -> None:
    filled = torch.zeros(1, 10, 10, dtype=torch.uint8)
    filled[:, 1:, 1:] = 240  # bright, but three corners of the four are not
    filled[:, -1, 0] = filled[:, 0, -1] = 0
    assert found(find_polarity([0.286], [0.353]), filled[None]) == []


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        (None, None),
        ([0.1307], None),
        ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),  # photographs
        ([0.45], [0.25]),  # gray photographs
        ([0.5], [0.5]),  # bits or a habit
        ([0.0], [1.0]),  # no normalization
        ([0.1], [0.9]),  # nothing in [0, 1] deviates so far
    ],
)
def test_nothing_is_said_unless_the_statistics_are_certain(mean: list[float] | None, std: list[float] | None) -> None:
    assert find_polarity(mean, std) is None


def test_the_warning_names_the_picture_and_the_remedy() -> None:
    polarity = Polarity(0.1307, dark_background=True)
    assert describe_inverted(polarity, [("five.png", 0.871)]) == (
        "five.png: dark on light (mean brightness 0.87), but the model was trained on images that are light on dark "
        "(mean 0.13); invert it first, for example with PIL.ImageOps.invert"
    )
    assert describe_inverted(polarity, [("a.png", 0.871)] * 2).startswith("a.png and 1 more image: dark on light (")
    assert "a.png and 1,000 more images: " in describe_inverted(polarity, [("a.png", 0.9)] * 1001)
    assert "; invert them first" in describe_inverted(polarity, [("a.png", 0.9)] * 3)
    on_paper = Polarity(0.87, dark_background=False)
    assert "light on dark (mean brightness 0.10), but the model was trained on images that are dark on light" in (
        describe_inverted(on_paper, [("a.png", 0.1)])
    )
