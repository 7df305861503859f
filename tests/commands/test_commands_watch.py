"""`lockstep watch` beside runs that train, are killed, resume and end; and on folders in every state."""

import json
import os
import pty
import re
import signal
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import DIGITS, Start, invoke
from event_examples import RESUMED_FROM, done, evaluated, started, stepped, stopped, write

from lockstep.errors import UsageError
from lockstep.jobs import reader
from lockstep.jobs.reader import RunReader, RunWatcher
from lockstep.reporting.jsonl import JsonLines
from lockstep.reporting.page_server import PageServer
from lockstep.training.events import Event
from lockstep.training.lock import lock

pytestmark = pytest.mark.slow("runs whole commands")


def run_folder(run: Path, *events: Event, first: float = 100.0) -> Path:
    """Make a run folder, or go on with its log, an event each second."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "lock").touch()
    write(JsonLines(run / "events.jsonl"), *events, first=first)
    return run


watch = partial(invoke, "watch")


def losses(url: str) -> int:
    """Return how many points the curve of the loss has in the page."""
    with urllib.request.urlopen(f"{url}data", timeout=10) as answer:
        [figure] = (each["figure"] for each in json.load(answer)["parts"] if each["key"] == "Chart loss")
    return len(figure["data"][0]["y"])


def files(run: Path) -> dict[str, tuple[int, int]]:
    """Return what would show that somebody wrote to a folder."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in [run, *run.rglob("*")]}


def test_a_run_that_begins_is_killed_resumes_and_ends(start: Start, killed: Start) -> None:
    """The page is asked while the run stands still, and what is left of its log is shown as it is resumed."""
    seen = start("watch", "run", "--wait", "--port", "0")
    seen.until(lambda: "waiting for a run to start" in seen.out)
    training = (*DIGITS, "placement.processes=1", "run.save_every={steps: 5}")
    killed("train", *training, run="run", step=8)
    seen.until(lambda: "saved after step 5" in seen.out)
    url = re.findall(r"http://127\.0\.0\.1:\d+/", seen.err)[0]
    seen.until(lambda: losses(url) == 8)
    again = start("train", *training, "run.dir=run")
    assert again.wait() == 0, again.err
    assert seen.wait() == 0, seen.err
    assert seen.left() == []
    assert "resumed after step 5: single on 1, cpu, 3 later steps are recomputed" in seen.out
    assert "run is done in " in seen.out
    assert seen.sha256 == again.sha256


def test_ctrl_c_ends_the_watch_alone(start: Start, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", started(), stepped(10))
    with lock(run):
        before = files(run)
        seen = start("watch", "run", "--port", "0")
        seen.until(lambda: "step 10/690" in seen.out)
        seen.signal(signal.SIGINT)
        assert seen.wait() == 130
        assert seen.left() == []
        assert files(run) == before
        assert seen.err.endswith("interrupted\n")


def test_a_terminal_has_a_view_that_is_cleared_in_the_end(start: Start, tmp_path: Path) -> None:
    run_folder(tmp_path / "run", started(), stepped(10), done())
    ours, theirs = pty.openpty()
    seen = start("watch", "run", tty=os.ttyname(theirs), TERM="xterm", COLUMNS="100", LINES="30")
    assert seen.wait() == 0
    os.close(theirs)
    text = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "run  done  single on 1, cpu" in text
    assert "weights sha256" in text.rpartition("\x1b[?25h")[2]  # below the view, and the cursor is there


def test_how_runs_ended_and_with_which_code(tmp_path: Path) -> None:
    first = run_folder(tmp_path / "done", started(), stepped(), done())
    saved = run_folder(tmp_path / "saved", started(), stepped(10), stopped())
    failed = run_folder(tmp_path / "failed", started(), stepped(10))
    (failed / "result.json").write_text('{"event": "failed", "reason": "loss is nan\\u001b[2J"}')
    before = files(tmp_path)
    assert watch(str(first), code=0).stdout.splitlines()[-2].startswith(f"{first} is done in 0:02")
    assert f"{saved} stopped by SIGTERM; start it again" in watch(str(saved), str(first), code=75).stdout
    assert watch(str(failed), code=1).stdout.splitlines()[-1] == f"{failed} failed: loss is nan\\x1b[2J"
    assert files(tmp_path) == before


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", started())
    with PageServer("127.0.0.1", 0) as server:
        port = server.url.rstrip("/").rpartition(":")[2]
        assert watch(str(run), "--port", port, code=2).stderr.startswith(f"error: --port {port}: cannot listen: ")


def test_of_a_folder_the_runs_that_go_on_are_watched_and_those_that_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_SEARCH_S", 0.0)
    run_folder(tmp_path / "old", started(), done())
    going = run_folder(tmp_path / "going", started(), stepped(10))
    new = tmp_path / "new"
    with lock(going):
        seen = RunWatcher([tmp_path], wait=False)
        assert [each.name for each in seen.refresh()] == [str(going)]
        with lock(new):
            found = seen.refresh()
            assert [(each.folder, each.state) for each in found] == [
                (f"{going}", "running"),
                (f"{new}", "running"),
            ]
    assert [each.state for each in seen.refresh()] == ["died", "died"]
    with pytest.raises(UsageError, match="no run is in progress"):
        RunWatcher([tmp_path], wait=False).refresh()
    assert RunWatcher([tmp_path, tmp_path / "nowhere"], wait=True).refresh() == []


def test_only_what_was_added_is_read_and_another_log_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder(tmp_path / "run", started(), *(stepped(step) for step in range(1, 500)))
    followed = RunReader(run)
    parsed: list[Any] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text, **options: parsed.append(text) or loads(text, **options))
    followed.refresh()
    assert (len(parsed), followed.make_view(None).status.step) == (500, 499)
    with (run / "events.jsonl").open("a") as log:
        log.write('{"event": "step", "half')
    for _ in range(3):
        followed.refresh()
    assert len(parsed) == 500
    run_folder(run, stepped(500))  # which cuts the half line off, as a run that resumes does
    parsed.clear()
    followed.refresh()
    assert (len(parsed), followed.make_view(None).status.step) == (1, 500)
    (run / "events.jsonl").unlink()
    run_folder(run, started(), stepped(1), first=9_000.0)
    followed.refresh()
    found = followed.make_view(None)
    assert (found.status.step, found.notice_count, len(found.history.curves["loss/train"])) == (1, 1, 1)


def test_a_long_log_is_read_in_parts_and_goes_on_until_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_EVENTS_PER_REFRESH", 10)
    run = run_folder(tmp_path / "run", started(), *(stepped(step) for step in range(1, 25)), done())
    followed, states = RunReader(run), []
    for _ in range(4):
        followed.refresh()
        found = followed.make_view(None)
        states.append((found.is_fully_read, found.state, found.status.step))
    assert states == [(False, "running", 9), (False, "running", 19), (True, "done", 690), (True, "done", 690)]


def test_lines_that_are_no_events_are_left_out_and_said(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", started(), stepped(1))
    with (run / "events.jsonl").open("a") as log:
        log.write('{]\n[1]\n{"event": "step"}\n{"event": "started", "step": "x"}\n' + "1" * 2_000_000 + "\n")
    run_folder(run, stepped(2), evaluated(), first=200.0)
    followed = RunReader(run)
    followed.refresh()
    found = followed.make_view(None)
    assert [point.step for point in found.history.curves["loss/train"]] == [1, 2]
    warnings = [each.text for each in found.notices if each.kind == "warning"]
    assert f"{run}/events.jsonl:3: not an event; skipped" in warnings
    assert f"{run}/events.jsonl:4: not an event; skipped" in warnings
    assert sum("an event with an unknown format was skipped" in each for each in warnings) == 2
    assert found.status.step == 69


def test_a_log_of_a_newer_version_or_none_at_all_is_unreadable(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", started())
    (run / "events.jsonl").write_text('{"event": "started", "schema": 99}\n')
    assert "written by a newer version" in watch(str(run), code=1).stdout
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").symlink_to("/dev/zero")
    assert "it is a symbolic link" in watch(str(run), code=1).stdout


def test_a_run_that_resumes_under_another_placement(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", started(), stepped(46), stepped(60))
    followed = RunReader(run)
    followed.refresh()
    run_folder(run, started(46, RESUMED_FROM), stepped(50), first=500.0)
    followed.refresh()
    found = followed.make_view(None)
    assert [point.step for point in found.history.curves["loss/train"]] == [46, 50]
    assert found.notices[-1].text.startswith("resumed after step 46")
