"""The event log is strict JSON, line by line, whatever happened before."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from event_examples import SHA, done, evaluated, every, saved, stepped, write

from lockstep.errors import TrainingError, UsageError
from lockstep.reporting import jsonl
from lockstep.reporting.jsonl import JsonLines
from lockstep.training.events import UNITS


def log(path: Path) -> list[dict[str, Any]]:
    return list(jsonl.read_events(path))


def append(path: Path, *steps: int) -> None:
    write(JsonLines(path), *(stepped(step) for step in steps))


def test_every_event_comes_back_flat(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a" / "events.jsonl"
    sink = JsonLines(path)
    for number, event in enumerate(every()):
        sink.write(event, 1000.5 + number)
    lines = log(path)  # before the sink is closed
    sink.close()
    sink.close()
    assert [line["event"] for line in lines] == ["started", "step", "evaluated", "saved", "stopped", "done"]
    assert [line["time"] for line in lines] == [1000.5, 1001.5, 1002.5, 1003.5, 1004.5, 1005.5]
    assert all({"step", "epoch", "samples"} < set(line) for line in lines)
    assert lines == [jsonl.to_json_fields(event, 1000.5 + number) for number, event in enumerate(every())]


def test_the_figures_of_a_task_are_lifted_out() -> None:
    line = jsonl.to_json_fields(evaluated(), 0.0)
    assert (line["top1"], line["top5"]) == (355 / 360, 1.0)
    assert not {"figures", "name"} & set(line)
    line = jsonl.to_json_fields(done(), 0.0)
    assert (line["top1"], line["best_top1"], line["weights_sha256"]) == (0.98333, 355 / 360, SHA)
    assert jsonl.to_json_fields(saved(), 0.0)["best"] is True


def test_only_the_started_line_carries_units() -> None:
    assert [jsonl.to_json_fields(event, 0.0).get("units") for event in every()] == [UNITS, *[None] * 5]


@pytest.mark.parametrize(
    ("value", "text"), [(float("nan"), "NaN"), (float("inf"), "Infinity"), (float("-inf"), "-Infinity")]
)
def test_what_is_not_finite_is_still_strict_json(tmp_path: Path, value: float, text: str) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    write(JsonLines(tmp_path / "events.jsonl"), stepped(loss=value))
    line = json.loads((tmp_path / "events.jsonl").read_text(), parse_constant=refuse)
    assert line["loss"] == text
    assert repr(float(line["loss"])) == repr(value)


def test_a_run_that_goes_on_appends(tmp_path: Path) -> None:
    append(tmp_path / "events.jsonl", 1)
    append(tmp_path / "events.jsonl", 2)
    assert [line["step"] for line in log(tmp_path / "events.jsonl")] == [1, 2]


@pytest.mark.parametrize("cut", [1, 2, 30, 200_000])
def test_a_half_line_is_cut_off_and_a_whole_one_ended(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    append(path, 1)
    whole = path.read_bytes()
    last = json.dumps({"event": "step", "step": 2, "long": "x" * 300_000}).encode() + b"\n"
    path.write_bytes(whole + last[:-cut])
    assert [line["step"] for line in log(path)] == [1]
    append(path, 3)
    assert [line["step"] for line in log(path)] == ([1, 2, 3] if cut == 1 else [1, 3])


@pytest.mark.parametrize("tail", [b"", b"{", b"\0\0\0"])
def test_a_log_without_a_whole_line_begins_anew(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(tail)
    append(path, 3)
    assert [line["step"] for line in log(path)] == [3]


def test_a_disk_that_fills_up_is_an_error_and_the_next_run_mends_the_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    sink = JsonLines(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
    try:
        with pytest.raises(TrainingError, match=r"events\.jsonl: event not written: File too large"):
            sink.write(stepped(2), 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    sink.close()
    assert not path.read_bytes().endswith(b"\n")
    append(path, 3)
    assert [line["step"] for line in log(path)] == [1, 3]


def test_reading_names_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with pytest.raises(UsageError, match=r"events\.jsonl: not found"):
        log(path)
    path.write_text('{"event": "step"}\nnonsense\n')
    with pytest.raises(UsageError, match=r"events\.jsonl:2: not JSON"):
        log(path)
    path.write_text("[1]\n")
    with pytest.raises(UsageError, match=r"events\.jsonl:1: not an event"):
        log(path)


def test_a_log_that_a_folder_replaced_is_not_written_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonLines(path)
    path.rename(tmp_path / "aside")
    path.mkdir()
    with pytest.raises(TrainingError, match=r"events\.jsonl: was replaced while the run was writing to it"):
        sink.write(stepped(1), 1.5)
    sink.close()


def test_a_log_that_was_removed_is_not_written_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonLines(path)
    path.unlink()
    with pytest.raises(TrainingError, match=r"events\.jsonl: was removed while the run was writing to it"):
        sink.write(stepped(1), 1.5)
    sink.close()
