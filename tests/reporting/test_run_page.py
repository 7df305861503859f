"""What a browser gets of runs that are watched: strict JSON with the same charts as a report, and all text escaped."""

import json
import math
from dataclasses import replace

from event_examples import evaluated, saved, started, stepped, stopped
from view_examples import GOING, viewed

from lockstep.reporting.charts import Chart
from lockstep.reporting.page import Paragraphs, ProgressBar, Table, ValueGrid, render_live_page, render_live_sections
from lockstep.reporting.page_server import encode_live_data
from lockstep.reporting.run_log import History
from lockstep.reporting.run_page import make_curve_sections, make_live_sections, make_sections, make_title
from lockstep.reporting.thinning import Point
from lockstep.training.events import Skipped

EVIL = "</script><img src=x onerror=alert(1)>"


def test_the_charts_are_those_of_a_report() -> None:
    run = viewed(*GOING, (162.0, stepped(70, math.nan)))
    found = json.loads(encode_live_data([run], is_final=False), parse_constant=lambda name: 1 / 0)
    figures = {each["key"]: each["figure"] for each in found["parts"] if each["figure"]}
    made = [each for each in make_curve_sections({run.folder: run.history}) if isinstance(each, Chart)]
    known = {f"Chart {each.title}": {**each.figure, "axes": [*each.axes], "legend": each.legend} for each in made}
    assert figures == known
    assert len({each["key"] for each in found["parts"]}) == len(found["parts"])
    assert figures["Chart loss"]["data"][0]["y"][-2:] == [0.43214, None]
    assert (found["title"], found["over"]) == ("running 10 % runs/a", False)


def test_how_far_each_run_is_comes_first_then_its_curves_and_then_tables() -> None:
    one, two, *others = make_live_sections([viewed(*GOING), viewed(name="runs/b", whole=False)])
    drawn = [isinstance(each, Chart) for each in others]
    assert drawn == sorted(drawn, reverse=True)
    assert others[0].title == "loss"
    _, told, *_ = others[drawn.index(False) :]  # after the figures that were reported once
    assert isinstance(one, ProgressBar)
    assert isinstance(two, ProgressBar)
    assert (one.title, one.done, one.total) == ("runs/a", 69, 690)
    assert dict(one.entries) | {"last event": "", "time left": ""} == {
        "state": "running",
        "placement": "single on 1, cpu",
        "epoch": "3/30",
        "step": "69/690",
        "time left": "",
        "last event": "",
        "samples/s": "88",
        "loss/train": "0.4321",
        "loss/validation": "0.1023",
        "top1": "98.61 %",
        "top5": "100.00 %",
        "lr": "0.09511",
        "norm": "1.5",
    }
    assert (two.done, two.total, two.entries) == (0, 1, [("state", "reading its log")])
    assert isinstance(told, Table)
    assert (told.title, told.columns) == ("Latest events", ["time", "run", "event"])
    assert make_title([]) == "0 runs"
    assert json.loads(encode_live_data([], is_final=True)) == {"title": "0 runs", "over": True, "parts": []}


def test_many_runs_have_their_progress_in_one_table() -> None:
    table, *others = make_live_sections([viewed(*GOING, name=f"runs/{number}") for number in range(15)])
    assert isinstance(table, Table)
    assert (len(table.rows), table.done) == (15, [0.1] * 15)
    assert "time left" in table.columns
    assert not any(isinstance(each, ProgressBar) or each.title == "Runs" for each in others)
    [still, *_] = make_sections([viewed(*GOING, name=f"runs/{number}") for number in range(15)])
    assert isinstance(still, Table)
    assert not still.done


def test_a_live_page_shows_a_figure_of_a_single_run_once() -> None:
    sections = make_live_sections([viewed(*GOING)])
    [bar, *_], [grid, *_] = sections, [each for each in sections if isinstance(each, ValueGrid) and each.title == "Run"]
    assert isinstance(bar, ProgressBar)
    assert {name for name, _ in grid.entries}.isdisjoint(name for name, _ in bar.entries)
    assert "starts" in dict(grid.entries)
    [told] = [each for each in sections if each.title == "Latest events"]
    assert isinstance(told, Table)
    assert told.columns == ["time", "event"]


def test_the_name_of_a_run_alone_is_in_no_row() -> None:
    run = viewed(*GOING, (162.0, saved()), (163.0, saved()))
    for page in (make_sections([run]), make_live_sections([run])):
        html = "".join(each["html"] for each in render_live_sections(page) if "<table" in each["html"])
        assert ">70" not in html
        assert "690" in html
        assert f">{run.folder}<" not in html
    checkpoints = make_sections([run, viewed(*GOING, (162.0, saved()), name="runs/b")])[-1]
    assert isinstance(checkpoints, Table)
    assert [(name, len(rows)) for name, rows in checkpoints.groups] == [("runs/a", 2), ("runs/b", 1)]
    assert "run" not in checkpoints.headings


def test_a_figure_that_was_reported_once_is_a_number() -> None:
    once = History(curves={"acc": [Point(1, 8, 0.1, 2.0)], "peak_bytes": [Point(1, 8, 0.1, float(3 << 20))]})
    twice = History(curves={"acc": [Point(1, 8, 0.1, 2.0), Point(2, 16, 0.2, 2.5)]})
    [grid] = make_curve_sections({"a": once})
    assert grid == ValueGrid("Reported once", [("acc", "2"), ("peak memory, MiB", "3")])
    drawn, table = make_curve_sections({"a": once, "b": twice})
    assert isinstance(drawn, Chart)
    assert [trace["meta"]["name"] for trace in drawn.figure["data"]] == ["a", "b"]
    assert table == Table("Reported once", ["run", "peak memory, MiB"], [["a", "3"]])


def test_a_run_has_one_color_in_all_charts_and_shares_begin_at_zero() -> None:
    points = [Point(1, 8, 0.1, 0.9), Point(2, 16, 0.2, 0.95)]
    full = History(curves={"loss/train": points, "mfu": points, "samples_per_s": points})
    drawn = make_curve_sections({"a": History(curves={"loss/train": points}), "b": full})
    charts = {each.title: each for each in drawn if isinstance(each, Chart)}
    colors = {title: chart.figure["data"][-1]["line"]["color"] for title, chart in charts.items()}
    assert len(set(colors.values())) == 1
    assert colors["loss"] != charts["loss"].figure["data"][0]["line"]["color"]
    modes = {title: chart.figure["layout"]["yaxis"].get("rangemode") for title, chart in charts.items()}
    assert modes == {"loss": None, "samples/s": "tozero", "MFU": "tozero"}


def test_flops_are_drawn_only_if_they_are_another_curve_than_samples() -> None:
    points = [Point(1, 8, 0.1, 100.0), Point(2, 16, 0.2, 120.0)]

    def a_run(flops: int) -> History:
        curves = {"samples_per_s": points, "flops_per_s": [each._replace(value=each.value * flops) for each in points]}
        return History(curves=curves, started={"flops_per_sample": flops})

    [chart] = make_curve_sections({"a": a_run(2_000_000), "b": a_run(2_000_000)})
    assert isinstance(chart, Chart)
    assert (chart.title, chart.note) == ("samples/s", "FLOP/s is this curve times 2 MFLOP, the cost of a sample.")
    titles = [each.title for each in make_curve_sections({"a": a_run(2_000_000), "b": a_run(3_000_000)})]
    assert titles == ["samples/s", "FLOP/s"]


def test_files_that_were_skipped_are_counted_once() -> None:
    skipped = [(time, Skipped(step=9, epoch=0, samples=576, files=("a.jpg", "b.jpg"))) for time in (163.0, 164.0)]
    runs = [viewed(*GOING, *skipped), viewed(name="runs/b", state="died"), viewed(name="runs/c", state="died")]
    [words] = [each for each in make_sections(runs) if isinstance(each, Paragraphs)]
    assert words.paragraphs[0].startswith("runs/b, runs/c ended without recording a reason")
    assert words.paragraphs[1:] == ["runs/a skipped 2 unreadable files; see skipped.txt"]
    assert words.title == "Why runs stopped"
    assert not any(isinstance(each, Paragraphs) for each in make_sections([viewed(*GOING)]))


def test_what_runs_are_called_is_text() -> None:
    run = viewed(*GOING, name=EVIL, state="failed", failure=EVIL)
    html = "".join(each["html"] for each in json.loads(encode_live_data([run], is_final=False))["parts"])
    assert "&lt;img" in html
    assert "<img" not in html
    assert "<script" not in html


def test_the_page_may_ask_its_own_server_and_nobody_else() -> None:
    html = render_live_page("Runs", 2_000)
    policy = html.partition('Content-Security-Policy" content="')[2].partition('"')[0]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.endswith("; connect-src 'self'")
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")


def test_what_a_loop_logs_by_its_own_names_is_drawn_too() -> None:
    def titles(*names: str) -> list[tuple[str, list[str]]]:
        history = History(curves={name: [Point(1, 8, 0.1, 2.0), Point(2, 16, 0.2, 1.0)] for name in names})
        drawn = [each for each in make_curve_sections({"a": history}) if isinstance(each, Chart)]
        return [(each.title, [trace["name"] for trace in each.figure["data"]]) for each in drawn]

    assert titles("acc/validation", "acc/train") == [("acc/validation", ["a"]), ("acc", ["a, training"])]
    assert titles("loss") == [("loss", ["a"])]
    assert titles("loss/train", "loss/validation", "loss") == [
        ("loss", ["a, training", "a, validation"]),
        ("loss as logged", ["a"]),
    ]


def test_a_figure_of_an_earlier_step_than_the_run_has_names_its_step() -> None:
    end = (170.0, replace(stopped(), step=75))
    runs = [viewed(*GOING, (165.0, stepped(75)), end, state="saved"), viewed(*GOING, name="runs/b")]
    [table, *_] = make_sections(runs)
    assert isinstance(table, Table)
    first, second = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert (first["loss/train"], first["loss/validation"]) == ("0.4321", "0.1023 (step 69)")
    assert first["top1"] == "98.61 % (step 69)"
    assert (second["loss/train"], second["loss/validation"]) == ("0.4321", "0.1023")


def test_the_best_of_several_runs_is_marked() -> None:
    worse = viewed((100.0, started()), (101.0, replace(evaluated(), figures={"top1": 0.5})), name="runs/b")
    [table, *_] = make_sections([worse, viewed(*GOING)])
    assert isinstance(table, Table)
    at = table.columns.index("best")
    assert [row[at] for row in table.rows] == ["", "by top1"]
    [alike, *_] = make_sections([viewed(*GOING), viewed(*GOING, name="runs/b")])
    assert isinstance(alike, Table)
    assert "best" not in alike.columns


def test_a_checkpoint_that_is_not_in_its_folder_is_marked() -> None:
    run = viewed(*GOING, *((time, replace(saved(), step=int(time) - 100)) for time in (162.0, 163.0)))
    for kept, marks in ((frozenset({63}), ["removed", "kept"]), (frozenset[int](), ["removed"] * 2), (None, [""] * 2)):
        table = make_sections([replace(run, checkpoints=kept)])[-1]
        assert isinstance(table, Table)
        assert table.title == "Checkpoints"
        assert [row[table.columns.index("files")] for row in table.rows] == marks
