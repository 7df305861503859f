"""The tables of a run: a row for each report, once for each step whatever was done again."""

from dataclasses import replace
from pathlib import Path

import pytest
from event_examples import RESUMED_FROM, evaluated, every, rows, started, stepped, write

from lockstep.reporting.tables import EVALUATIONS, LOGGED, STEPS, CsvTables
from lockstep.training.events import Logged


def test_a_row_has_the_figures_of_its_event(tmp_path: Path) -> None:
    write(CsvTables(tmp_path), *every())
    (step,), (evaluation,) = rows(tmp_path / STEPS), rows(tmp_path / EVALUATIONS)
    assert (step["step"], float(step["loss"]), float(step["lr"]), step["loss_scale"]) == ("69", 0.43214, 0.09511, "")
    assert (evaluation["step"], float(evaluation["top1"]), evaluation["of"]) == ("69", 355 / 360, "360")
    assert "event" not in step


def test_a_resumed_run_takes_back_what_it_does_again(tmp_path: Path) -> None:
    write(CsvTables(tmp_path), started(), *(stepped(step) for step in (23, 46, 69, 92)), evaluated())
    write(CsvTables(tmp_path), started(46, RESUMED_FROM), stepped(69, loss=0.25))
    found = rows(tmp_path / STEPS)
    assert [row["step"] for row in found] == ["23", "46", "69"]
    assert float(found[-1]["loss"]) == 0.25
    assert rows(tmp_path / EVALUATIONS) == []  # that of step 69 is done again too


@pytest.mark.parametrize("left", ["time,st", "time,step,loss\n1,23,0.5\n2,4"])
def test_what_a_kill_left_of_a_row_is_gone(tmp_path: Path, left: str) -> None:
    write(CsvTables(tmp_path), started(), stepped(23))
    whole = (tmp_path / STEPS).read_text()
    (tmp_path / STEPS).write_text(whole + "1001.0,4" if "\n" in left else left)
    write(CsvTables(tmp_path), started(23, RESUMED_FROM), stepped(46))
    assert [row["step"] for row in rows(tmp_path / STEPS)] == (["23", "46"] if "\n" in left else ["46"])


def test_a_figure_that_is_new_gets_a_column(tmp_path: Path) -> None:
    write(CsvTables(tmp_path), evaluated(), replace(evaluated(), figures={"top1": 1.0, "f1": 0.5}))
    first, second = rows(tmp_path / EVALUATIONS)
    assert (first["f1"], second["f1"], second["top1"], second["top5"]) == ("", "0.5", "1.0", "")
    assert first["loss"] == second["loss"] != ""


def test_what_a_loop_of_ones_own_logs_is_a_table_too(tmp_path: Path) -> None:
    logs = [
        Logged(step=step, epoch=0, samples=64, figures={name: 0.5}) for step, name in ((3, "a"), (6, "b"), (9, "a"))
    ]
    write(CsvTables(tmp_path), started(), *logs)
    write(CsvTables(tmp_path), started(6, RESUMED_FROM), logs[-1])
    assert [(row["step"], row["a"], row["b"]) for row in rows(tmp_path / LOGGED)] == [
        ("3", "0.5", ""),
        ("6", "", "0.5"),
        ("9", "0.5", ""),
    ]
