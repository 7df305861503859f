"""Control groups of both versions: the tightest limit holds, whichever of the groups around a process has it."""

from pathlib import Path

import pytest

from lockstep.common import control_groups, platforms


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 1.5), ("max 100000", None), ("", None)])
def test_the_cores_that_a_container_allows(tmp_path: Path, text: str, cores: float | None) -> None:
    own = group(tmp_path, "0::/a/b")
    (tmp_path / "a" / "cpu.max").write_text(text, encoding="utf-8")
    (tmp_path / "a" / "b" / "cpu.max").write_text("400000 100000", encoding="utf-8")
    assert control_groups.read_cpu_limit(tmp_path, own) == (cores or 4.0)  # the tighter one holds
    assert control_groups.read_cpu_limit(tmp_path / "none", own) is None


def test_the_memory_that_a_container_allows(tmp_path: Path) -> None:
    own = group(tmp_path, "0::/a/b")
    (tmp_path / "a" / "b" / "memory.max").write_text("max", encoding="utf-8")
    assert control_groups.read_memory_limit(tmp_path, own) is None
    (tmp_path / "a" / "memory.max").write_text("1048576", encoding="utf-8")
    assert control_groups.read_memory_limit(tmp_path, own) == 1 << 20


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    own = group(tmp_path, "4:cpu,cpuacct:/x\n3:memory:/x\n")
    for name in ("cpu", "memory"):
        (tmp_path / name / "x").mkdir(parents=True)
    (tmp_path / "cpu" / "x" / "cpu.cfs_quota_us").write_text("50000\n", encoding="utf-8")
    (tmp_path / "cpu" / "x" / "cpu.cfs_period_us").write_text("100000\n", encoding="utf-8")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n", encoding="utf-8")
    (tmp_path / "memory" / "x" / "memory.limit_in_bytes").write_text("9223372036854771712\n", encoding="utf-8")
    assert control_groups.read_cpu_limit(tmp_path, own) == 0.5
    assert control_groups.read_memory_limit(tmp_path, own) is None


def group(root: Path, text: str) -> Path:
    (root / "a" / "b").mkdir(parents=True)
    (root / "own").write_text(text, encoding="utf-8")
    return root / "own"


@pytest.mark.parametrize(("quota", "cores"), [(None, 4), (2.9, 2), (0.5, 1), (64.0, 4)])
def test_what_is_usable_is_what_both_the_affinity_and_a_container_allow(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int
) -> None:
    monkeypatch.setattr(platforms.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(platforms, "read_cpu_limit", lambda: quota)
    assert platforms.count_usable_cores() == cores
