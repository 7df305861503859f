"""`lockstep report` on run folders, good and bad: what differs, restarts, checkpoints, curves, and what is refused."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import invoke
from event_examples import done, evaluated, saved, started, stepped, write

import lockstep
from lockstep.config.load import load, to_yaml
from lockstep.errors import UsageError
from lockstep.jobs.reader import read_runs_by_name
from lockstep.reporting.charts import Chart
from lockstep.reporting.jsonl import JsonLines
from lockstep.reporting.page import Table, ValueGrid
from lockstep.reporting.run_page import make_curve_sections, make_sections
from lockstep.runs.runs import describe_machine
from lockstep.training.events import Event

pytestmark = [pytest.mark.slow("runs whole commands"), pytest.mark.usefixtures("here")]


def run_folder(name: str, *events: Event, overrides: tuple[str, ...] = ()) -> Path:
    """Make a run folder with a log that has an event each second."""
    run = Path("runs") / name
    write(JsonLines(run / "events.jsonl"), *events)
    (run / "config.yaml").write_text(to_yaml(load("digits", overrides)), encoding="utf-8")
    environment = {"cpu": {"model": "EPYC", "cores_usable": 2}, "packages": {"torch": "2.15.0"}, "gpus": []}
    (run / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    return run


report = partial(invoke, "report")


def tables(*folders: Path) -> dict[str, list[dict[str, str]]]:
    """Return the tables of a page on the runs, by their headings."""
    found, _ = read_runs_by_name(folders or [Path("runs")])
    made = [each for each in make_sections(found) if isinstance(each, Table)]
    return {each.title: [dict(zip(each.columns, row, strict=True)) for row in each.rows] for each in made}


def test_a_page_of_two_runs() -> None:
    run_folder("a", started(), stepped(30, 0.75), stepped(), evaluated(), saved(), done())
    run_folder("b", started(), stepped(30, 0.5), overrides=("recipe.optimizer.lr=0.3", "placement.processes=2"))
    assert report().stdout == "written report.html\n"
    html = Path("report.html").read_text(encoding="utf-8")
    charts = [json.loads(text) for text in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html)]
    loss = next(each for each in charts if each["layout"]["yaxis"]["title"]["text"] == "loss")
    drawn = {trace["name"]: trace["y"] for trace in loss["data"]}
    assert drawn == {"runs/a, training": [0.75, 0.43214], "runs/a, validation": [0.1023], "runs/b, training": [0.5]}
    assert "<title>2 runs</title>" in html


def test_from_python_the_page_is_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    run_folder("a", started(), stepped(), evaluated(), saved(), done())
    run_folder("b", started(), stepped(30, 0.5))
    (Path("runs") / "b" / "events.jsonl").write_text("nonsense\n", encoding="utf-8")
    report()
    capfd.readouterr()
    found = lockstep.report(out="own.html")
    assert (found.page, found.charts) == (Path("own.html"), ())
    [warning] = found.warnings
    assert "not JSON" in warning
    assert Path("own.html").read_bytes() == Path("report.html").read_bytes()
    assert "<title>runs/a</title>" in lockstep.report([Path("runs/a")]).page.read_text(encoding="utf-8")
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("nowhere", {}, "nowhere: no such folder"),
        ("runs", {"trust": True}, "overrides require --examples"),
        ("runs", {"examples": True, "samples": 0}, "--samples: must be at least 1, got 0"),
        ("runs", {"out": "no/where.html"}, "folder no does not exist"),
    ]
    for runs, options, told in refused:
        with pytest.raises(UsageError, match=re.escape(told)):
            lockstep.report(runs, **options)
    assert capfd.readouterr() == ("", "")


def test_tables() -> None:
    run_folder("a", started(), stepped(), evaluated(), saved(), done())
    resumed = started(46, "runs/x")
    run_folder(
        "b",
        *(started(), stepped(46), stepped(69), replace(resumed, processes=2, strategy="ddp", again=23), stepped(50)),
        overrides=("recipe.optimizer.lr=0.3", "placement.processes=2"),
    )
    found = tables()
    first, second = found["Runs"]
    assert first == {
        "run": "runs/a",
        "recipe.optimizer.lr.value": "0.1",
        "placement.strategy.name": "single",
        "placement.processes": "1",
        "state": "done",
        "step": "690/690",
        "time": "0:04",
        "loss/train": "0.4321 (step 69)",
        "loss/validation": "0.1023 (step 69)",
        "top1": "98.61 % (step 69)",
        "samples/s": "4,416",
        "starts": "1",
        "weights": "0123456789ab",
    }
    assert (second["state"], second["step"], second["starts"], second["weights"]) == ("died", "50/690", "2", "")
    assert [*second.values()][:4] == ["runs/b", "0.3", "ddp", "2"]
    assert "What differs" not in found
    assert [list(row.values()) for row in found["Restarts"]] == [
        ["runs/b", "0", "0:00", "single on 1, cpu", "0"],
        ["runs/b", "46", "0:02", "ddp on 2, cpu", "23"],
    ]
    assert [list(row.values()) for row in found["Checkpoints"]] == [
        ["runs/a", "690", "0:03", "0.10 s", "0123456789ab", "yes", "removed"]
    ]
    (Path("runs") / "a" / "checkpoints" / "step-00000690").mkdir(parents=True)
    assert tables()["Checkpoints"][0]["files"] == "kept"


def test_more_than_three_keys_that_differ_have_a_table() -> None:
    run_folder("a", started(), stepped(), done())
    run_folder(
        "b", started(), stepped(), done(), overrides=("recipe.seed=1", "recipe.epochs=9", "recipe.clip_norm=2.5")
    )
    assert {"recipe.seed", "recipe.epochs", "recipe.clip_norm"} < tables()["Runs"][1].keys()
    overrides = ("recipe.seed=2", "recipe.batch=128")
    run_folder("c", started(), stepped(), done(), overrides=overrides)
    found = tables()
    assert [*found["What differs"][2].values()] == ["runs/c", "128", "25", "1.0", "2"]
    assert found["Runs"][2].keys().isdisjoint({"recipe.seed", "machine"})  # one machine is named below the table


def test_the_charts_begin_with_the_losses_and_end_with_the_machine() -> None:
    twice = [replace(evaluated(), step=step, weights=weights) for weights in ("model", "ema") for step in (46, 69)]
    run_folder("a", started(), stepped(46), *twice, stepped(), done())
    found, _ = read_runs_by_name([Path("runs")])
    drawn = [
        each for each in make_curve_sections({run.folder: run.history for run in found}) if isinstance(each, Chart)
    ]
    assert [each.title for each in drawn] == [
        *("loss", "top1", "top5", "loss/validation/ema", "top1/ema", "top5/ema"),
        *("samples/s", "waiting for data, seconds per step", "learning rate", "gradient norm", "peak memory, MiB"),
    ]
    assert drawn[-1].figure["data"][0]["y"] == [1000 / 2**20] * 2
    percent = {each.title: "tickformat" in each.figure["layout"]["yaxis"] for each in drawn}
    assert (percent["top1"], percent["top1/ema"], percent["loss"]) == (True, True, False)


def test_one_run_differs_from_none() -> None:
    run_folder("a", started(), stepped(), done())
    runs, _ = read_runs_by_name([Path("runs/a"), Path("runs")])  # named twice
    grid, *others = make_sections(runs)
    assert isinstance(grid, ValueGrid)
    assert dict(grid.entries)["machine"] == "2 cores of EPYC, torch 2.15.0"
    assert not {"Runs", "What differs", "Restarts"} & {each.title for each in others}


def test_runs_of_strangers(here: Path) -> None:
    """What cannot be read is listed as such; a link is not followed, and a failure is text."""
    run_folder("a", started(), stepped(), done())
    damaged = here / "runs" / "damaged"
    damaged.mkdir()
    (damaged / "events.jsonl").write_text("nonsense\n", encoding="utf-8")
    linked = here / "runs" / "linked"
    linked.mkdir()
    (linked / "events.jsonl").symlink_to("/etc/passwd")
    (linked / "lock").touch()
    failed = run_folder("failed", started())
    reason = {"event": "failed", "exit_code": 1, "reason": "<script>alert(1)</script>"}
    (failed / "result.json").write_text(json.dumps(reason), encoding="utf-8")
    result = report()
    assert "not JSON" in result.stderr
    assert [(row["run"], row["state"]) for row in tables()["Runs"]] == [
        ("runs/a", "done"),
        ("runs/damaged", "unreadable"),
        ("runs/failed", "failed"),
        ("runs/linked", "unreadable"),
    ]
    html = Path("report.html").read_text(encoding="utf-8")
    assert "runs/failed failed: &lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "root:x:" not in html


@pytest.mark.parametrize("text", ["", "[]", "null", '{"cpu": 3, "packages": [], "gpus": "x"}', "[" * 10_000])
def test_a_machine_that_is_not_recorded_is_not_named(here: Path, text: str) -> None:
    (here / "environment.json").write_text(text, encoding="utf-8")
    assert describe_machine(here) == ""


def test_cards_are_counted(here: Path) -> None:
    found: dict[str, Any] = {"gpus": [{"name": "A100"}, {"name": "A100"}], "packages": {"torch": "2.15.0"}}
    (here / "environment.json").write_text(json.dumps(found), encoding="utf-8")
    assert describe_machine(here) == "2 A100, torch 2.15.0"
