"""What follows from the runs of a comparison: speed-up, efficiency, equal bits; the table, the JSON, the time left."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from event_examples import SHA, done, evaluated, started, stepped

from lockstep.comparison.output import Display, write_results
from lockstep.comparison.page import make_sections, make_title
from lockstep.comparison.result import Comparison, ResultRow, format_conclusions, make_columns, to_json
from lockstep.reporting.charts import Chart
from lockstep.reporting.jsonl import to_json_fields
from lockstep.reporting.page import Paragraphs, Table
from lockstep.reporting.run_log import History, build_history

OTHER = "f" * 64


def a_history(seconds: float, weights: str = SHA, ranks: int = 1) -> History:
    """Return the log of a run of 43,110 samples, half of whose seconds are training."""
    spent = {"setting up": seconds / 2, "computing": seconds / 4, "data": seconds / 8, "waiting": seconds / 8}
    end = replace(
        done(),
        weights_sha256=weights,
        seconds_by_rank={what: [each] * ranks for what, each in spent.items()},
        peak_bytes_by_rank=[(rank + 1) << 20 for rank in range(ranks)],
    )
    events = [(started(), 0.0), (stepped(23), 1.0), (stepped(), 1.5), (evaluated(), 2.0), (end, seconds)]
    return build_history([to_json_fields(event, time) for event, time in events])


def a_row(
    strategy: str, processes: int, seconds: float, weights: str = SHA, variant: str = "", **other: Any
) -> ResultRow:
    found = a_history(seconds, weights, processes)
    return ResultRow(strategy, processes, variant, f"runs/{strategy}-{processes}", state="done", history=found, **other)


ROWS = (
    a_row("single", 1, 40.0),
    a_row("ddp", 2, 25.0),
    a_row("zero3", 2, 50.0, OTHER),
    a_row("deepspeed", 2, 40.0, OTHER, promises="close"),
    ResultRow("ddp", 4, "", "runs/ddp-4", state="failed", reason="lost a rank"),
    a_row("single", 1, 80.0, OTHER, "recipe.seed=1"),
    a_row("ddp", 2, 40.0, OTHER, "recipe.seed=1"),
)
COMPARISON = Comparison("digits", ROWS, "2 cores")


def test_figures_beside_one_process_of_the_same_recipe() -> None:
    assert ROWS[0].samples_per_s == pytest.approx(43_110 / 20)
    assert [COMPARISON.speed_up(row) for row in ROWS] == pytest.approx([1.0, 1.6, 0.8, 1.0, None, 1.0, 2.0])
    assert [COMPARISON.efficiency(row) for row in ROWS[:3]] == pytest.approx([1.0, 0.8, 0.4])
    assert [COMPARISON.same_bits(row) for row in ROWS] == [True, True, False, False, None, True, True]
    assert COMPARISON.broken == [ROWS[2]]  # deepspeed promises no bits
    assert COMPARISON.failed == [ROWS[4]]
    assert [row.part("computing") for row in ROWS[:1]] == [0.5]


def test_without_one_process_nothing_is_compared() -> None:
    alone = Comparison("digits", (replace(ROWS[0], state="failed"), *ROWS[1:3]))
    assert [alone.speed_up(row) for row in alone.rows] == [None] * 3
    assert alone.broken == []


def test_the_table() -> None:
    found = make_columns(COMPARISON)
    table = [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
    assert table[1] == {
        "placement": "ddp on 2",
        "recipe": "",
        "state": "done",
        "time": "25.0 s",
        "loss": "0.1023",
        "top1": "98.61 %",
        "samples/s": "3,449",
        "speed-up": "1.60",
        "efficiency": "80%",
        "computing": "50%",
        "data": "25%",
        "waiting": "25%",
        "peak memory": "2 MiB",
        "same bits": "yes",
        "weights": "01234567",
    }
    assert [row["same bits"] for row in table] == ["", "yes", "no", "no (close)", "", "", "yes"]
    assert (table[4]["state"], table[4]["time"]) == ("failed", "")
    log = ROWS[5].history.evaluated
    worse = replace(ROWS[5], history=replace(ROWS[5].history, evaluated={**log, "top1": 0.5}))
    assert make_columns(Comparison("digits", (worse, ROWS[0])))["best"] == ["", "by top1"]
    assert not {"state", "best", "speed-up", "efficiency", "for a core"} & {
        *make_columns(Comparison("digits", (ROWS[0], ROWS[5])))
    }


def test_what_is_said_below_it() -> None:
    failed, broken = format_conclusions(COMPARISON)
    assert failed == "ddp on 4 failed: lost a rank"
    assert broken.startswith("zero3 on 2 has different weights than one process, although strategy zero3 promises the")


def test_json_has_what_the_table_has_and_each_rank() -> None:
    found = json.loads(to_json(COMPARISON), parse_constant=lambda text: pytest.fail(text))
    assert found["machine"] == "2 cores"
    row = found["rows"][1]
    assert (row["placement"], row["run"], row["seconds"]) == ("ddp on 2", "runs/ddp-2", 25.0)
    assert (row["same_bits_as_single"], row["promises"], row["weights_sha256"]) == (True, "bits", SHA)
    assert row["peak_bytes_by_rank"] == [1 << 20, 2 << 20]
    assert row["seconds_by_rank"]["computing"] == [6.25, 6.25]
    assert row["last"]["top1"] == 355 / 360
    assert found["rows"][4]["seconds"] is None


def test_how_far_it_is() -> None:
    running = ResultRow(
        "ddp", 2, "", "runs/a", state="running", step=10, steps=40, left_s=30.0, history=History(seconds=10.0)
    )
    waiting = ResultRow("ddp", 4, "", "runs/b")
    now = Comparison("digits", (ROWS[0], running, waiting))
    assert make_columns(now)["state"][1] == "step 10/40, 0:30 left"
    assert now.left_s == 30.0 + 40.0  # the mean of 40 s, that were taken, and 10 + 30
    assert Comparison("digits", (replace(running, left_s=None), waiting)).left_s is None
    assert Comparison("digits", (waiting,)).left_s is None
    assert Comparison("digits", ROWS[:2]).left_s == 0


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


RUNNING = replace(ROWS[1], state="running", step=10, steps=40, left_s=30.0, history=History(seconds=10.0))
STATES = (
    Comparison("digits", (replace(ROWS[0], state="running", history=History()), ResultRow("ddp", 2, "", "runs/b"))),
    Comparison("digits", (ROWS[0], RUNNING)),
    Comparison("digits", (ROWS[0], replace(RUNNING, step=11))),
    Comparison("digits", (ROWS[0], replace(ROWS[4], reason="lost a \x1b[2Jrank"))),
)


def test_what_is_shown_in_a_pipe_while_runs_go_on() -> None:
    stream = StringIO()
    with Display(stream) as shown:
        for each in STATES:
            shown.show(each)
    assert stream.getvalue().splitlines() == [
        "... single on 1",
        "... ddp on 2",
        r"ddp on 4: failed: lost a \x1b[2Jrank",
    ]


def test_what_is_shown_on_a_terminal_while_runs_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "240")
    stream = Terminal()
    with Display(stream) as shown:
        for each in STATES:
            shown.show(each)
        assert "step 10/40, 0:30 left" in stream.getvalue()
        assert "0:30 left in total" in stream.getvalue()
    assert "\x1b[?25h" in stream.getvalue()  # the cursor is there again


def test_a_narrow_terminal_gets_whole_columns_and_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    write_results(Comparison("digits", ROWS[:4]), tmp_path, stream, with_page=False, with_png=False)
    assert "single on 1" in stream.getvalue()
    assert (
        "hidden, because the terminal is too narrow: waiting, data, computing, peak memory, efficiency"
        in stream.getvalue()
    )


def test_the_files(tmp_path: Path) -> None:
    stream = StringIO()
    paths = write_results(COMPARISON, tmp_path, stream, with_page=True, with_png=False)
    assert [path.name for path in paths] == ["comparison.json", "comparison.html"]
    assert "<title>2 variants of digits under 5 placements</title>" in paths[1].read_text(encoding="utf-8")
    assert "ddp on 4 failed: lost a rank" in stream.getvalue()
    assert write_results(COMPARISON, tmp_path, stream, with_page=False, with_png=False) == paths[:1]


def test_a_page_is_called_after_what_it_compares() -> None:
    placements, sweep, alone = (make_title(Comparison("digits", rows)) for rows in (ROWS[:5], ROWS[::5], ROWS[:1]))
    assert placements == "digits under 5 placements"
    assert (sweep, alone) == ("2 variants of digits, single on 1", "digits, single on 1")


def test_a_page_has_the_table_and_a_chart_for_each_question() -> None:
    found = make_sections(COMPARISON)
    assert [section.title for section in found] == [
        "",
        "Runs",
        "Time of the whole training",
        "Throughput",
        "Speed-up over one process",
        "Scaling efficiency",
        "loss",
        "Where each second goes",
        "Peak memory of each rank",
    ]
    words, table, time, *_ = found
    assert isinstance(words, Paragraphs)
    assert isinstance(table, Table)
    assert words.paragraphs[1] == "ddp on 4 failed: lost a rank"
    assert len(table.rows) == len(ROWS)
    assert isinstance(time, Chart)
    drawn_lines = {trace["name"]: (trace["x"], trace["y"]) for trace in time.figure["data"]}
    assert drawn_lines == {  # each strategy begins at the one process of its recipe
        "ddp": ([1, 2], [40, 25]),
        "zero3": ([1, 2], [40, 50]),
        "deepspeed": ([1, 2], [40, 40]),
        "ddp, recipe.seed=1": ([1, 2], [80, 40]),
    }


def sweep(*variants: str) -> Comparison:
    """Return a sweep whose runs end at a top1 of 10 %, 20 % and so on."""
    rows = [a_row("single", 1, 40.0, variant=variant) for variant in variants]
    for number, row in enumerate(rows, start=1):
        row.history.evaluated["top1"] = number / 10  # type: ignore[index]
    return Comparison("digits", tuple(rows))


def test_the_page_of_a_sweep_begins_with_results_and_ends_with_seconds() -> None:
    page = make_sections(sweep("recipe.optimizer.lr=1.5", "recipe.optimizer.lr=0.01", "recipe.optimizer.lr=0.1"))
    names = ["Runs", "loss", "top1 by recipe.optimizer.lr", "Where each second goes", "Peak memory of each rank"]
    assert [section.title for section in page] == names
    table, curves, results, seconds, _ = page
    assert isinstance(table, Table)
    assert table.columns[0] == "recipe"  # the title names the placement
    assert isinstance(curves, Chart)
    variants = ["recipe.optimizer.lr=1.5", "recipe.optimizer.lr=0.01", "recipe.optimizer.lr=0.1"]
    assert [row[0] for row in table.rows] == [f"{variants[0]} (unchanged)", *variants[1:]]  # the first is the recipe
    assert [*dict.fromkeys(trace["meta"]["name"] for trace in curves.figure["data"])] == variants
    assert isinstance(seconds, Chart)
    assert seconds.figure["data"][0]["y"] == variants
    assert isinstance(results, Chart)
    [line] = results.figure["data"]
    assert (line["x"], line["y"]) == ([0.01, 0.1, 1.5], [0.2, 0.3, 0.1])
    assert results.figure["layout"]["xaxis"]["type"] == "log"
    assert results.figure["layout"]["yaxis"]["tickformat"] == ".0%"


@pytest.mark.parametrize(
    "variants",
    [
        ("recipe.seed=1", "recipe.seed=2"),
        ("recipe.seed=1", "recipe.seed=2", "recipe.epochs=3"),
        ("recipe.batchnorm=sync", "recipe.batchnorm=local", "recipe.batchnorm=off"),
        ("recipe.seed=1", "recipe.seed=2", "recipe.seed=nan"),
    ],
)
def test_a_sweep_over_other_things_than_a_number_has_no_chart_of_results(variants: tuple[str, ...]) -> None:
    assert not [section for section in make_sections(sweep(*variants)) if " by " in section.title]


def test_where_seconds_go_is_a_mean_of_the_ranks() -> None:
    row = replace(ROWS[1], history=replace(ROWS[1].history, last={**ROWS[1].history.last}))
    row.history.last["seconds_by_rank"] = {"computing": [1.0, 3.0], "waiting": [3.0, 1.0]}  # type: ignore[index]
    [chart] = [each for each in make_sections(Comparison("digits", (row,))) if each.title == "Where each second goes"]
    assert isinstance(chart, Chart)
    assert {trace["name"]: trace["x"] for trace in chart.figure["data"]} == {"computing": [2.0], "waiting": [2.0]}


def test_one_process_alone_makes_a_page_too() -> None:
    assert "Throughput" not in [section.title for section in make_sections(Comparison("digits", ROWS[:1]))]
    assert make_sections(Comparison("digits", (ROWS[4],)))[-1].title == "Runs"
