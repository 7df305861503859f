"""What is said of memory; tests/faults lets the kernel kill a rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.ranks import oom


def test_the_peak_of_a_process_is_what_it_has_had() -> None:
    """In a process of its own: this one may have had more before."""
    code = """from lockstep.ranks.oom import get_peak_bytes
b = get_peak_bytes(); x = b'x' * (64 << 20); print(get_peak_bytes() - b)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 60 << 20 <= int(done.stdout) <= 80 << 20
    assert oom.get_peak_bytes(os.getpid()) > 0
    assert oom.get_peak_bytes(2**30) == 0  # no such process


def test_kills_are_counted_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = tmp_path / "vmstat"
    counts.write_text("pgfault 12\noom_kill 3\n")
    monkeypatch.setattr(oom, "_VMSTAT", counts)
    killed = oom.KillDetector(20)
    assert killed.describe_memory(0) == ""
    assert killed.describe_memory(3 << 30) == "it used up to 3,072 MiB"
    counts.write_text("pgfault 12\noom_kill 4\n")
    assert killed.describe_memory(3 << 30) == (
        "out of memory: the kernel killed a process on this host; it used up to 3,072 MiB"
    )
    assert oom.count_kills() == 4


def test_a_kill_of_long_ago_is_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another job on a shared host, say."""
    counts = tmp_path / "vmstat"
    counts.write_text("oom_kill 3\n")
    monkeypatch.setattr(oom, "_VMSTAT", counts)
    killed = oom.KillDetector(20)
    counts.write_text("oom_kill 4\n")
    killed.record_healthy()
    assert "out of memory" in killed.describe_memory(0)  # who was killed may not have ended yet
    for _ in range(20):
        killed.record_healthy()
    assert killed.describe_memory(0) == ""


def test_without_counts_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom, "_VMSTAT", tmp_path / "none")
    assert oom.count_kills() == 0
