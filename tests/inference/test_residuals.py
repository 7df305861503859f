"""Predicted beside true, and where they are furthest apart."""

import pytest
import torch
from looked import evaluated, validation
from torch import Tensor

from lockstep.inference.residuals import make_residual_sections
from lockstep.reporting.charts import Chart
from lockstep.reporting.page import Table
from lockstep.tasks.regression import Regression

TASK = Regression()


def sections(true: Tensor, found: Tensor, names: tuple[str, ...] = ()) -> tuple[list[Chart], Table]:
    half = len(true) // 2
    halves = slice(0, half), slice(half, len(true))
    batches = [evaluated((true[rows], true[rows]), found[rows], rows.start) for rows in halves]
    *charts, table = make_residual_sections("r", TASK, validation(TASK, (true, true), len(true)), names, batches)
    assert isinstance(table, Table)
    return [each for each in charts if isinstance(each, Chart)], table


def test_one_number() -> None:
    true, found = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([[1.5], [2.0], [0.0], [4.25]])
    [chart], table = sections(true, found, ("price",))
    assert chart.title == "r: predicted price"
    assert chart.figure["data"][0]["x"] == [1.0, 2.0, 3.0, 4.0]
    assert chart.figure["data"][0]["y"] == [1.5, 2.0, 0.0, 4.25]
    assert table.rows[:2] == [["sample 2", "3", "0"], ["sample 0", "1", "1.5"]]


@pytest.mark.parametrize(("names", "first"), [(("a", "b", "c", "d", "e"), "a"), ((), "number 0")])
def test_several_numbers(names: tuple[str, ...], first: str) -> None:
    true = torch.zeros(6, 5)
    found = torch.zeros(6, 5)
    found[4, 0] = 7.0
    charts, table = sections(true, found, names)
    assert [each.title for each in charts][:1] == [f"r: predicted {first}"]
    assert len(charts) == 4
    assert charts[0].note == "The first 4 of 5 numbers."
    assert table.rows[0] == ["sample 4", first, "0", "7"]


def test_of_many_samples_some_are_drawn() -> None:
    [chart], _ = sections(torch.arange(9000.0), torch.arange(9000.0))
    drawn = chart.figure["data"][0]["x"]
    assert (len(drawn), drawn[0], drawn[-1]) == (2000, 0.0, 8999.0)
    assert chart.note == "2,000 of 9,000 samples, evenly spaced."
