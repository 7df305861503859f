"""What a run that ends by a fault leaves behind: words, where there is somebody to say them, and nothing else."""

import signal
import time
from pathlib import Path

import pytest
from conftest import DIGITS, held_at

from lockstep.common.interrupts import DUPLICATES_S

pytestmark = pytest.mark.slow("runs whole commands")

TRAIN = ("train", *DIGITS, "run.dir=run")


def test_a_crash_in_native_code_leaves_the_stack_in_the_log(run, tmp_path: Path) -> None:
    command = run(*TRAIN, 'recipe.loss={name: "ending:crashing"}', "placement.processes=2", code=1)
    assert "] error: was killed by SIGSEGV" in command.err
    assert command.err.endswith("  its log: run/logs/rank-1.log\n")
    log = (tmp_path / "run" / "logs" / "rank-1.log").read_text(encoding="utf-8")
    assert "Fatal Python error: Segmentation fault" in log
    assert "ending.py" in log


def test_a_crash_of_the_only_process_is_on_the_terminal(run) -> None:
    command = run(*TRAIN, 'recipe.loss={name: "ending:crashing"}', "placement.processes=1", code=-signal.SIGSEGV)
    assert "Fatal Python error: Segmentation fault" in command.err
    assert "ending.py" in command.err


def test_ranks_meet_in_a_file_that_nobody_can_remove(start) -> None:
    """It is in memory, where no disk is full, and has no name; a second Ctrl-C leaves nothing behind."""
    command = held_at(start, 3, *TRAIN, "placement.processes=2")
    opened = [str(each.readlink()) for each in Path(f"/proc/{command.pid}/fd").iterdir() if each.is_symlink()]
    assert [name for name in opened if "lockstep" in name] == ["/memfd:lockstep (deleted)"]
    assert list(Path("/dev/shm").glob(f"*{command.pid}*")) == []
    command.signal(signal.SIGINT)
    command.until_heard()
    time.sleep(DUPLICATES_S)
    command.signal(signal.SIGINT)
    assert command.wait() == 130
