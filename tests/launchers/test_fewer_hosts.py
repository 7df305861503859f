"""torchrun that began with fewer hosts than it was to wait for is refused, whoever else could tell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.launchers.torchrun import check_can_leave, check_hosts, check_restarts, make_store_warning

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

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
        UsageError, match=r"--nnodes requests 2 hosts, but torchrun started with 1 \(GROUP_WORLD_SIZE=1\); "
    ):
        check_hosts([*AGENT, *words], env)


def test_the_command_sees_what_started_it(tmp_path: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "a"}
    # A shell that has the words of an agent and stays the parent.
    words = ["sh", "-c", f"{sys.executable} -m lockstep train digits run.dir=run; exit $?", "agent", "--nnodes=2"]
    done = subprocess.run(words, env={**os.environ, **env}, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "torchrun: --nnodes requests 2 hosts, but torchrun started with 1 (GROUP_WORLD_SIZE=1)" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "env", "asked"),
    [
        ([], {"TORCHELASTIC_MAX_RESTARTS": "3"}, "--max-restarts=3"),
        (["--nnodes=1:3"], {"TORCHELASTIC_MAX_RESTARTS": "0"}, "--nnodes=1:3"),
    ],
)
def test_a_run_that_may_start_again_has_a_folder(words: list[str], env: dict[str, str], asked: str) -> None:
    with pytest.raises(UsageError, match=rf"run\.dir: not set, but torchrun may restart the run \({asked}\)"):
        check_restarts([*AGENT, *words], env, None)
    check_restarts([*AGENT, *words], env, "runs/a")
    check_restarts(AGENT, {"TORCHELASTIC_MAX_RESTARTS": "0"}, None)


def test_a_host_that_is_to_leave_can(tmp_path: Path) -> None:
    for words, restarts in (["--nnodes=3"], "3"), (["--nnodes=2:3"], "0"), ([], "3"):
        with pytest.raises(UsageError, match="on_corruption: go_on requires torchrun with restarts"):
            check_can_leave([*AGENT, *words], {"TORCHELASTIC_MAX_RESTARTS": restarts})
    check_can_leave([*AGENT, "--nnodes=2:3"], {"TORCHELASTIC_MAX_RESTARTS": "3"})


def test_who_may_wait_in_vain_is_warned(tmp_path: Path) -> None:
    shared = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    words = ["--nnodes", "1:3"]
    assert "torchrun --nnodes=1:3 without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in make_store_warning(
        [*AGENT, *words], shared
    )
    assert not make_store_warning([*AGENT, *words], {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert not make_store_warning([*AGENT, "--nnodes=2"], shared)
    assert not make_store_warning([*AGENT, "--nnodes=2:2"], shared)
    assert not make_store_warning(AGENT, shared)


def test_torchrun_says_what_the_check_and_the_warning_go_by(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--max-restarts=0", "--nproc-per-node=1"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-conf=last_call_timeout=1"]
    words = ["-m", "lockstep", "train", "digits"]
    env = {key: value for key, value in os.environ.items() if key != "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
    done = subprocess.run([*torchrun, *words], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "run.dir: not set, but torchrun may restart the run (--nnodes=1:2)" in done.stderr
    assert "warning: torchrun --nnodes=1:2 without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in done.stderr
