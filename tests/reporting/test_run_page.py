"""What a browser gets of runs that are watched: strict JSON with the same charts as a report, and all text escaped."""

import json
import math

from event_examples import stepped
from view_examples import GOING, viewed

from lockstep.reporting.charts import Chart
from lockstep.reporting.page import ProgressBar, Words, live_page
from lockstep.reporting.page_server import live_data
from lockstep.reporting.run_log import History
from lockstep.reporting.run_page import charts, live_sections, sections, title
from lockstep.reporting.thinning import Point
from lockstep.training.events import Skipped

EVIL = "</script><img src=x onerror=alert(1)>"


def test_the_charts_are_those_of_a_report() -> None:
    run = viewed(*GOING, (162.0, stepped(70, math.nan)))
    found = json.loads(live_data([run], over=False), parse_constant=lambda name: 1 / 0)
    figures = {each["key"]: each["figure"] for each in found["parts"] if each["figure"]}
    made = {f"Chart {each.title}": {**each.figure, "axes": [*each.axes]} for each in charts({run.folder: run.history})}
    assert figures == made
    assert len({each["key"] for each in found["parts"]}) == len(found["parts"])
    assert figures["Chart loss"]["data"][0]["y"][-2:] == [0.43214, None]
    assert (found["title"], found["over"]) == ("running 10 % runs/a", False)


def test_how_far_each_run_is_comes_first_then_its_curves_and_then_words() -> None:
    one, two, *others = live_sections([viewed(*GOING), viewed(name="runs/b", whole=False)])
    drawn = [isinstance(each, Chart) for each in others]
    assert drawn == sorted(drawn, reverse=True)
    assert others[0].title == "loss"
    told = others[drawn.index(False)]
    assert isinstance(one, ProgressBar)
    assert isinstance(two, ProgressBar)
    assert (one.title, one.done, one.total) == ("runs/a  running  single on 1, cpu", 69, 690)
    assert (two.done, two.total, two.lines) == (0, 1, ["reading its log"])
    assert told.title == "What happened last"
    assert title([]) == "0 runs"
    assert json.loads(live_data([], over=True)) == {"title": "0 runs", "over": True, "parts": []}


def test_files_that_were_skipped_are_counted_once() -> None:
    skipped = [(time, Skipped(step=9, epoch=0, samples=576, files=("a.jpg", "b.jpg"))) for time in (163.0, 164.0)]
    runs = [viewed(*GOING, *skipped), viewed(name="runs/b", state="died"), viewed(name="runs/c", state="died")]
    [words] = [each for each in sections(runs) if isinstance(each, Words)]
    assert words.paragraphs[0].startswith("runs/b, runs/c ended without a reason, as SIGKILL")
    assert words.paragraphs[1:] == ["runs/a skipped 2 files that cannot be read: see skipped.txt"]
    assert not any(isinstance(each, Words) for each in sections([viewed(*GOING)]))


def test_what_runs_are_called_is_text() -> None:
    run = viewed(*GOING, name=EVIL, state="failed", failure=EVIL)
    html = "".join(each["html"] for each in json.loads(live_data([run], over=False))["parts"])
    assert "&lt;img" in html
    assert "<img" not in html
    assert "<script" not in html


def test_the_page_may_ask_its_own_server_and_nobody_else() -> None:
    html = live_page("Runs", 2_000)
    policy = html.partition('Content-Security-Policy" content="')[2].partition('"')[0]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.endswith("; connect-src 'self'")
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")


def test_what_a_loop_logs_by_its_own_names_is_drawn_too() -> None:
    def titles(*names: str) -> list[tuple[str, list[str]]]:
        history = History(curves={name: [Point(1, 8, 0.1, 2.0)] for name in names})
        return [(each.title, [trace["name"] for trace in each.figure["data"]]) for each in charts({"a": history})]

    assert titles("acc/validation", "acc/train") == [("acc/validation", ["a"]), ("acc", ["a, training"])]
    assert titles("loss") == [("loss", ["a"])]
    assert titles("loss/train", "loss/validation", "loss") == [
        ("loss", ["a, training", "a, validation"]),
        ("loss, as it was logged", ["a"]),
    ]
