"""scripts/with-slurm ends with its command, has its exit code, and leaves nothing behind."""

import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from component import require_slurm
from waiting import until

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "with-slurm"


@pytest.fixture(autouse=True)
def _slurm() -> None:
    require_slurm()


def below(pid: int) -> set[int]:
    """Return the processes that a process started, and those that they started, and so on."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # Slurm's daemons have threads that end soon
            for child in map(int, task.read_text(encoding="utf-8").split()):
                found |= {child} | below(child)
    return found


def test_its_exit_code_is_that_of_the_command() -> None:
    done = subprocess.run([SCRIPT, "srun", "-N2", "sh", "-c", "exit 7"], capture_output=True, timeout=60)
    assert done.returncode == 7
    assert not Path("/run/slurm").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 137), (signal.SIGKILL, -9)])
def test_killed_it_leaves_no_process(tmp_path: Path, number: int, code: int) -> None:
    with subprocess.Popen([SCRIPT, "sh", "-c", 'sinfo > "$0"; srun -n2 sleep 100', str(tmp_path / "up")]) as process:
        until(lambda: (tmp_path / "up").exists() and len(below(process.pid)) > 8, 30)
        pids = below(process.pid)
        process.send_signal(number)
        assert process.wait(30) == code
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 30)


def test_without_a_command_it_says_how_it_is_used() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "with-slurm: usage: scripts/with-slurm COMMAND [ARGUMENT]...\n")
