"""scripts/with-slurm ends with its command, has its exit code, and leaves nothing behind."""

import signal
import subprocess
from pathlib import Path

import pytest
from component import require_slurm
from waiting import killed

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "with-slurm"


@pytest.fixture(autouse=True)
def _slurm() -> None:
    require_slurm()


def test_its_exit_code_is_that_of_the_command() -> None:
    done = subprocess.run([SCRIPT, "srun", "-N2", "sh", "-c", "exit 7"], capture_output=True)
    assert done.returncode == 7
    assert not Path("/run/slurm").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 137), (signal.SIGKILL, -9)])
def test_killed_it_leaves_no_process(tmp_path: Path, number: int, code: int) -> None:
    up = tmp_path / "up"
    assert killed([SCRIPT, "sh", "-c", 'sinfo > "$0"; srun -n2 sleep 100', up], number, up, least=9) == code


def test_without_a_command_it_says_how_it_is_used() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "with-slurm: usage: scripts/with-slurm COMMAND [ARGUMENT]...\n")
