"""What a run that ends by a fault leaves behind: words, where there is somebody to say them, and nothing else."""

import signal
from pathlib import Path

from conftest import DIGITS
from held import hold

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


def test_what_ranks_meet_in_is_in_memory_and_goes_with_the_run(start) -> None:
    """No disk that is full is in their way; nor is anything left there, not even by a second Ctrl-C."""
    hold("run", 3)
    command = start(*TRAIN, "placement.processes=2")

    def folders() -> list[Path]:
        return list(Path("/dev/shm").glob(f"lockstep-{command.pid}-*"))

    command.until_step(3)
    assert len(folders()) == 1
    command.signal(signal.SIGINT)
    command.until_heard()
    command.signal(signal.SIGINT)
    assert command.wait() == 130
    assert folders() == []
