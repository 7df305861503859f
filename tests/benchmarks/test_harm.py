"""The table of what more processes do to a result: another one in the usual script, and the same in a recipe."""

from pathlib import Path

import pytest

from benchmarks import harm


@pytest.mark.worlds
def test_more_processes_change_the_usual_script_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = harm.rows([1, 2], 1, [3], tmp_path)
    assert (one.processes, two.processes) == (1, 2)
    assert one.usual != two.usual
    assert (one.ours, one.sha256) == (two.ours, two.sha256)
    harm.show([one, two], 1)
    assert f"{two.usual:.1f}" in capsys.readouterr().out
