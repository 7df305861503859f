"""A rank that runs another Lockstep is told before anything is made, also where both call it the same version."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked import as_rank
from waiting import free_port

import lockstep

pytestmark = pytest.mark.slow("runs whole commands")

WORDS = ("-m", "lockstep", "train", "digits", "run.dir=run")


def other(folder: Path) -> Path:
    """Make another checkout, of another version, and return where Python finds it."""
    there = folder / "other" / "lockstep"
    shutil.copytree(Path(lockstep.__file__).parent, there)
    file = there / "common" / "version.py"
    file.write_text(file.read_text(encoding="utf-8").replace(lockstep.__version__, "0.1.1"), encoding="utf-8")
    return there.parent


def test_another_lockstep_is_told(tmp_path: Path) -> None:
    """Its version, and the hash of its code, by which two that are called the same differ too."""
    there = other(tmp_path)
    port = free_port()
    own = [as_rank(0, 2, port), {**as_rank(1, 2, port), "PYTHONPATH": str(there)}]
    ranks = [
        subprocess.Popen(
            [sys.executable, *WORDS], env={**os.environ, **each}, cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        for each in own
    ]
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    told = (
        r"error: versions: rank 1 \(.*its source: [0-9a-f]{12}, not [0-9a-f]{12}; "
        rf"lockstep: 0\.1\.1, not {re.escape(lockstep.__version__)}; start"
    )
    assert all(re.search(told, error) for error in errors), errors
    assert not (tmp_path / "run").exists()
