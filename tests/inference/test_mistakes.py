"""The worst mistakes are those of the largest loss, with what the sample is, what was predicted, and its picture."""

import math

import pytest
import torch
from looked import evaluated, pixels, validation

from lockstep.inference.mistakes import (
    ClassPredictions,
    are_images,
    collect_predictions,
    make_mistake_sections,
    make_thumbnails,
)
from lockstep.inference.validation_pass import EvaluatedBatch
from lockstep.reporting.charts import Chart
from lockstep.reporting.page import Paragraphs, Section, Table, Tiles
from lockstep.tasks.classification import SKIPPED, Classification

TASK = Classification(classes=("cat", "dog", "cow"), topk=(1,))
# The probabilities of each sample, and its class: right, wrong, very wrong, not readable, wrong.
SHARES = torch.tensor([[0.8, 0.1, 0.1], [0.3, 0.5, 0.2], [0.9, 0.09, 0.01], [0.1, 0.1, 0.8], [0.2, 0.2, 0.6]])
TRUTHS = torch.tensor([0, 0, 2, SKIPPED, 1])


def batches(inputs: torch.Tensor, targets: torch.Tensor = TRUTHS) -> list[EvaluatedBatch]:
    """Return five samples in two batches."""
    both = slice(0, 3), slice(3, 5)
    return [evaluated((inputs[rows], targets[rows]), SHARES[rows].log(), rows.start) for rows in both]


def view(inputs: torch.Tensor, targets: torch.Tensor = TRUTHS) -> list[Section]:
    """Return what is seen of them."""
    return make_mistake_sections("r", TASK, validation(TASK, (inputs, targets), 5), batches(inputs, targets))


def test_the_largest_loss_is_first() -> None:
    found = collect_predictions(TASK, batches(torch.zeros(5, 7)))
    assert found.sample_indices.tolist() == [0, 1, 2, 4]  # what could not be read is no mistake
    assert [(each.sample_index, each.target, each.predicted) for each in found.find_worst_mistakes()] == [
        (2, 2, 0),
        (4, 1, 2),
        (1, 0, 1),
    ]
    assert [each.target_probability for each in found.find_worst_mistakes()] == pytest.approx([0.01, 0.2, 0.3])
    assert [each.predicted_probability for each in found.find_worst_mistakes(2)] == pytest.approx([0.9, 0.6])


def test_what_is_no_number_is_the_worst_and_equals_stay_in_order() -> None:
    losses = torch.tensor([1.0, 5.0, math.nan, 5.0], dtype=torch.float64)
    found = ClassPredictions(torch.arange(4), torch.zeros(4).long(), torch.ones(4).long(), losses, losses)
    assert [each.sample_index for each in found.find_worst_mistakes()] == [2, 1, 3, 0]


def test_the_heaviest_class_of_a_mixture_is_the_truth() -> None:
    mixtures = torch.tensor([[0.6, 0.4, 0], [0.6, 0.4, 0], [0, 0, 1], [0, 0, 0], [0, 1, 0]])
    assert [
        each.sample_index
        for each in collect_predictions(TASK, batches(torch.zeros(5, 7), mixtures)).find_worst_mistakes()
    ] == [2, 4, 1]


def test_pictures_are_those_of_the_mistakes() -> None:
    inputs = torch.randint(0, 256, (5, 3, 4, 4), generator=torch.Generator().manual_seed(0)).byte()
    matrix, classes, worst = view(inputs)
    assert (type(matrix), type(classes)) == (Chart, Table)
    assert isinstance(worst, Tiles)
    assert [tile.lines[0] for tile in worst.tiles] == ["sample 2", "sample 4", "sample 1"]
    assert worst.tiles[0].lines[1:] == ["true cow (1 %)", "predicted cat (90 %)"]
    for number, tile in zip((2, 4, 1), worst.tiles, strict=True):
        assert torch.equal(pixels(tile.source)[::28, ::28], inputs[number].permute(1, 2, 0))
    assert worst.note == "3 mistakes of 3, sorted by cross entropy, largest first."
    floats = view(inputs.float())[2]
    assert isinstance(floats, Tiles)
    assert "stretched" in floats.note


def test_samples_that_are_no_pictures_have_their_numbers() -> None:
    worst = view(torch.zeros(5, 7))[2]
    assert isinstance(worst, Table)
    assert worst.rows[0] == ["sample 2", "cow", "cat", "1 %", "90 %"]
    one = view(torch.zeros(5, 7), torch.tensor([0, 1, 0, 2, 1]))[2]
    assert isinstance(one, Table)
    assert one.note.startswith("1 mistake of 1, ")


def test_a_model_without_mistakes() -> None:
    worst = view(torch.zeros(5, 7), SHARES.argmax(1))[2]
    assert worst == Paragraphs("r: worst mistakes", ["There are no mistakes."])


@pytest.mark.parametrize("channels", [1, 3])
def test_each_pixel_of_a_small_picture_is_a_square_of_its_value(channels: int) -> None:
    given = torch.randint(0, 256, (2, channels, 8, 6), generator=torch.Generator().manual_seed(0)).byte()
    for one, source in zip(given, make_thumbnails(given), strict=True):
        shown = pixels(source)
        assert shown.shape[:2] == (8 * 14, 6 * 14)
        assert torch.equal(shown[7::14, 7::14], one[0] if channels == 1 else one.permute(1, 2, 0))


def test_a_large_picture_is_made_smaller() -> None:
    [source] = make_thumbnails(torch.full((1, 3, 300, 600), 77, dtype=torch.uint8))
    shown = pixels(source)
    assert shown.shape == (56, 112, 3)
    assert shown.unique().tolist() == [77]


def test_floats_are_stretched_from_black_to_white() -> None:
    values = torch.tensor([[-2.0, 0.0], [torch.nan, 2.0]])
    shown = pixels(make_thumbnails(values[None, None])[0])
    assert shown[::56, ::56].tolist() == [[0, 128], [128, 255]]
    assert pixels(make_thumbnails(torch.full((1, 1, 2, 2), 3.5))[0]).unique().tolist() == [0]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((5, 3, 8, 8), True), ((5, 1, 8, 8), True), ((5, 4, 8, 8), False), ((5, 1, 40), False), ((5, 3, 1, 9), False)],
)
def test_what_is_a_picture(shape: tuple[int, ...], expected: bool) -> None:
    assert are_images(torch.zeros(shape)) == expected
