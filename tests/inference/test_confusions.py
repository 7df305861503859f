"""Which class was predicted for which, counted by hand."""

import torch

from lockstep.inference.confusions import make_confusion_sections
from lockstep.reporting.charts import Chart
from lockstep.reporting.page import Paragraphs, Table


def test_few_classes_are_a_matrix() -> None:
    truths, guesses = torch.tensor([0, 0, 0, 1, 2]), torch.tensor([0, 0, 1, 1, 0])
    chart, classes = make_confusion_sections(
        "r", ["cat", "dog", "cow"], truths, guesses, torch.ones(5, dtype=torch.int64), "samples"
    )
    assert isinstance(chart, Chart)
    right, wrong = chart.figure["data"]
    assert right["text"] == [["2", "", ""], ["", "1", ""], ["", "", ""]]
    assert wrong["text"] == [["", "1", ""], ["", "", ""], ["1", "", ""]]
    assert wrong["z"] == [[None, 1 / 3, None], [None] * 3, [1.0, None, None]]
    assert isinstance(classes, Table)
    assert classes.rows == [
        ["cow", "1", "0.00 %", ""],
        ["cat", "3", "66.67 %", "66.67 %"],
        ["dog", "1", "100.00 %", "50.00 %"],
    ]


def test_many_classes_are_the_pairs_that_are_mistaken_most_often() -> None:
    names = [f"class {number}" for number in range(1000)]
    # Class n is right once, and the next one is predicted for it n times.
    truths, guesses = torch.arange(999).repeat(2), torch.cat([torch.arange(999), torch.arange(1, 1000)])
    times = torch.cat([torch.ones(999, dtype=torch.int64), torch.arange(999)])
    pairs, classes = make_confusion_sections("r", names, truths, guesses, times, "samples")
    assert isinstance(pairs, Table)
    assert isinstance(classes, Table)
    assert pairs.rows[0] == ["class 998", "class 999", "998", "99.90 %"]
    assert [row[0] for row in pairs.rows] == [f"class {number}" for number in range(998, 978, -1)]
    assert "1,000 classes are too many for a matrix. These are the most frequent of 999 pairs." in pairs.note
    assert classes.rows[0] == ["class 998", "999", "0.10 %", "0.10 %"]
    assert len(classes.rows) == 20
    assert "These are the 20 of 1,000 classes with the lowest recall." in classes.note


def test_many_classes_without_a_mistake() -> None:
    each = torch.arange(1000)
    pairs, _ = make_confusion_sections("r", [*map(str, range(1000))], each, each, torch.ones_like(each), "samples")
    assert pairs == Paragraphs("r: most frequent mistakes", ["There are no mistakes."])


def test_pixels_are_counted_by_their_times() -> None:
    cells = torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([12_345, 1_000_000])
    chart, classes = make_confusion_sections("r", ["road", "sky"], *cells, "pixels")
    assert isinstance(chart, Chart)
    assert [trace["text"] for trace in chart.figure["data"]] == [[["12.3k", ""], ["", ""]], [["", ""], ["1M", ""]]]
    assert chart.figure["data"][1]["hovertext"][1][0] == "true sky, predicted road: 1,000,000"
    assert isinstance(classes, Table)
    assert classes.rows == [["sky", "1,000,000", "0.00 %", ""], ["road", "12,345", "100.00 %", "1.22 %"]]


def test_a_model_that_predicts_one_class_for_everything_is_said_to() -> None:
    truths, guesses, times = torch.tensor([0, 1, 2]), torch.tensor([1, 1, 1]), torch.tensor([5, 4, 3])
    _, classes = make_confusion_sections("r", ["cat", "dog", "owl"], truths, guesses, times, "samples")
    assert isinstance(classes, Table)
    assert classes.note.startswith(
        "The model predicts dog for all samples: check that the targets belong to the inputs"
    )
    _, classes = make_confusion_sections("r", ["cat", "dog", "owl"], truths[1:2], guesses[1:2], times[1:2], "samples")
    assert isinstance(classes, Table)
    assert classes.note.startswith("Recall")  # all samples are dogs
