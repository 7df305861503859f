"""A run whose ranks wait too long for one of them says for whom, and goes on or ends, as was asked."""

import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import held_at
from held import HOLD
from test_resume import undisturbed
from test_stopping import TRAIN, assert_goes_on

pytestmark = pytest.mark.slow("runs whole commands")

SOON = ("placement.processes=3", "placement.stall_timeout_s=2")


@pytest.fixture(autouse=True)
def _run_in_memory(tmp_path: Path) -> Iterator[None]:
    """Put the run folder into memory: for a disk that is busy the ranks wait long enough to be told of rank 0 there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (tmp_path / "run").symlink_to(folder)
        yield


def test_the_late_rank_is_named_and_the_run_goes_on(start, finished):
    command = held_at(start, 7, *TRAIN, *SOON)
    command.until(lambda: "waits: in step" in command.err)
    HOLD.unlink()
    assert command.wait() == 0
    first, late, *others = command.err.splitlines()
    assert first.startswith("stalled: rank ")
    assert late.startswith("  rank 0 (")
    assert "is late: in step 8, lockstep/" in late
    records = ", ".join(f"run/logs/exchanges-rank-{rank}.json" for rank in range(3))
    assert command.err.splitlines().count(f"  torch's flight records: {records}") >= 1
    record = json.loads((command.folder / "run" / "logs" / "exchanges-rank-1.json").read_text())
    assert record["entries"][-1]["profiling_name"].startswith("gloo:")
    assert any("held.py:" in line and line.endswith(" cross_entropy") for line in others)
    assert command.sha256 == undisturbed(finished).sha256


def test_a_stall_ends_the_run_where_that_was_asked(start, run, finished):
    command = held_at(start, 7, *TRAIN, *SOON, "placement.on_stall=end")
    command.until(lambda: len(command.workers()) < 3)
    HOLD.unlink()  # else the agent waits half a minute for a rank that does not end
    assert command.wait() == 1
    first, late, *_ = command.err.splitlines()
    assert first.startswith("[rank ")
    assert re.search(r"\[rank 0.*\] stalled: rank [12] has waited \d+ s for rank 0$", first)
    result = json.loads((command.folder / "run" / "result.json").read_text())
    assert result["ranks"] == [0]
    assert result["reason"].endswith("for rank 0")
    assert late.startswith("  rank 0 (")
    assert command.left() == []
    assert_goes_on(run, finished, 2)


def test_a_save_may_take_longer_than_an_exchange(run):
    slow = 'recipe.model={name: "held:slow_to_save"}'  # four files, of a second each
    command = run(*TRAIN, slow, "placement.processes=2", "placement.timeout_s=3", "run.save_every.steps=20")
    assert "lost another rank" not in command.err
    saved = json.loads((command.folder / "run" / "result.json").read_text())
    assert saved["event"] == "done"


def test_a_stopped_rank_is_named(start, run, finished):
    command = held_at(start, 7, *TRAIN, *SOON, "placement.on_stall=end")
    stopped = command.workers()[1]
    os.kill(stopped, signal.SIGSTOP)
    HOLD.unlink()
    command.until(lambda: len(command.workers()) < 3)
    os.kill(stopped, signal.SIGCONT)
    assert command.wait() == 1
    assert "  rank 1 does not answer: stopped, hung or disconnected, or its host is down" in command.err.splitlines()
    assert command.left() == []
    assert_goes_on(run, finished, 2)
