"""torchrun that began with fewer hosts than it was to wait for is refused, whoever else could tell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.launchers.torchrun import check_hosts

AGENT = ["python", "-m", "torch.distributed.run"]


@pytest.mark.parametrize(
    ("words", "env"),
    [
        ([], {}),
        (["--nnodes=1"], {}),
        (["--nnodes", "1:3"], {}),
        (["--nnodes=1"], {"PET_NNODES": "2"}),
        (["--nnodes"], {}),
        (["--nnodes=many"], {}),
        (["--nnodes=2"], {"GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "3"}),  # 3 and 1
    ],
)
def test_so_many_hosts_will_do(words: list[str], env: dict[str, str]) -> None:
    check_hosts([*AGENT, *words], env)


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["--nnodes=2", "-m", "lockstep"], {}),
        (["--nnodes", "2:3", "-m", "lockstep"], {}),
        (["--nnodes=1", "--nnodes=2"], {}),  # the last one counts
        ([], {"PET_NNODES": "2"}),
    ],
)
def test_fewer_hosts_than_asked_for_are_refused(words: list[str], env: dict[str, str]) -> None:
    with pytest.raises(
        UsageError, match="--nnodes asks for 2 hosts, and it began with 1, as GROUP_WORLD_SIZE=1 says; "
    ):
        check_hosts([*AGENT, *words], env)


def test_the_command_sees_what_started_it(tmp_path: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "a"}
    # A shell that has the words of an agent and stays the parent.
    words = ["sh", "-c", f"{sys.executable} -m lockstep train digits run.dir=run; exit $?", "agent", "--nnodes=2"]
    done = subprocess.run(
        words, env={**os.environ, **env}, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 2
    assert "torchrun: --nnodes asks for 2 hosts, and it began with 1, as GROUP_WORLD_SIZE=1 says" in done.stderr
    assert not (tmp_path / "run").exists()
