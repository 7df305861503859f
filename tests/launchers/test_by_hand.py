"""The page on processes that people start themselves: each of its commands trains the weights of one process."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lockstep.runs.runs import is_locked

pytestmark = pytest.mark.slow("each command starts processes")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "by-hand.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
BLOCKS = [
    re.sub(r"^[$>] ", "", block, flags=re.MULTILINE)
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
]
OF_A_RANK = re.compile(r"^rank (\d) of (\d) (\w{64})$", re.MULTILINE)  # printed by loop.py
OF_A_RECIPE = re.compile(r"^weights sha256 (\w{64})$", re.MULTILINE)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def run(folder: Path, commands: str) -> subprocess.CompletedProcess[str]:
    """Run commands of the page in a folder with its scripts, on a port and a file of this test."""
    port = str(free_port())
    for name, text in SCRIPTS:
        (folder / name).write_text(text.replace("29511", port), encoding="utf-8")
    commands = commands.replace("29511", port).replace("/tmp/meeting", str(folder / "meeting"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # Without a buffer, Python prints a line and its end separately, so that lines of two ranks may get mixed.
    left_out = ("PYTEST", "PYTHONUNBUFFERED")
    env = {name: value for name, value in os.environ.items() if not name.startswith(left_out)} | {"PATH": path}
    return subprocess.run(["bash", "-c", commands], cwd=folder, env=env, capture_output=True, text=True)


def output(folder: Path, commands: str) -> str:
    done = run(folder, commands)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def by_one_process(tmp_path_factory: pytest.TempPathFactory) -> str:
    [(rank, size, weights)] = OF_A_RANK.findall(output(tmp_path_factory.mktemp("one"), "python loop.py"))
    assert (rank, size) == ("0", "1")
    return str(weights)


def test_the_page_has_three_ways() -> None:
    assert [name for name, _ in SCRIPTS] == ["loop.py", "spawn.py", "spawn_group.py", "group.py"]
    assert len(BLOCKS) == 6


@pytest.mark.parametrize("block", BLOCKS[:4], ids=["spawn", "group of spawn", "group of variables", "terminals"])
def test_a_loop_has_the_weights_of_one_process(block: str, by_one_process: str, tmp_path: Path) -> None:
    lines = block.splitlines()
    exports = [each for each in lines if each.startswith("export ")]
    commands = [each for each in lines if each not in exports]
    for command in commands:
        variables = exports if "torchrun" not in command else []
        printed = output(tmp_path, "\n".join([*variables, command]))
        expected = [("0", "2", by_one_process), ("1", "2", by_one_process)]
        assert sorted(OF_A_RANK.findall(printed)) == expected, f"{command}: {printed}"


def test_a_recipe_in_two_terminals_has_the_weights_of_one_process(tmp_path: Path) -> None:
    assert BLOCKS[4].count("lockstep train") == 3
    one, two = OF_A_RECIPE.findall(output(tmp_path, BLOCKS[4]))
    assert one == two


def test_workers_without_a_rank_are_told_by_the_number_of_processes(tmp_path: Path) -> None:
    run(tmp_path, "true")  # writes the scripts
    script = (tmp_path / "spawn.py").read_text(encoding="utf-8")
    update = next(line for line in script.splitlines() if "RANK=str(rank)" in line)
    (tmp_path / "unnamed.py").write_text(script.replace(update, "    pass"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "unnamed.py"], cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "placement.processes: got 2, but the world size is 1" in PAGE
    assert "placement.processes: got 2, but the world size is 1" in done.stderr


def test_verify_of_a_script_that_starts_processes_trains_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "lockstep verify --processes 2 --strategy ddp spawn.py runs/a")
    assert done.returncode != 0
    assert "verify the function that they call, with lockstep.verify(FUNCTION)" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_worker_that_fails_ends_all(tmp_path: Path) -> None:
    run(tmp_path, "true")
    script = (tmp_path / "spawn.py").read_text(encoding="utf-8")
    failing = script.replace("    train(processes=size, dir=dir)", "    fail(rank)").replace(
        "def worker",
        "def fail(rank):\n"
        "    import lockstep\n"
        "    with lockstep.join(seed=0) as run:\n"
        "        if rank == 1:\n"
        "            raise ValueError('a mistake')\n"
        "        run.sum([1])\n\n\n"
        "def worker",
    )
    (tmp_path / "failing.py").write_text(failing, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "failing.py"], cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "[rank 1 of 2" in done.stderr
    assert "ValueError: a mistake" in done.stderr
    assert "rank 0 is at run.sum" not in done.stderr


def test_a_worker_that_fails_within_a_step_is_told_to_see_its_traceback(tmp_path: Path) -> None:
    run(tmp_path, "true")
    loop = (tmp_path / "loop.py").read_text(encoding="utf-8")
    backward = next(line for line in loop.splitlines() if "step.backward" in line)
    indent = backward[: -len(backward.lstrip())]
    failing = f"{indent}if run.rank == 1:\n{indent}    raise ValueError('a mistake')\n{backward}"
    # Without the `with` statement, the run doesn't learn of the exception, which torch's worker catches.
    join = next(line.strip() for line in loop.splitlines() if "with lockstep.join" in line)
    plain = join.removeprefix("with ").removesuffix(" as run:")
    loop = loop.replace(join, f"run = {plain}\n    if run:").replace(backward, failing)
    (tmp_path / "loop.py").write_text(loop, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "spawn.py"], cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "ValueError: a mistake" in done.stderr
    assert "if an exception ended this process, see its traceback; otherwise let `for batch in step`" in done.stderr


@pytest.mark.parametrize(
    ("target", "reason", "code"),
    [("group", "SIGINT", -signal.SIGINT), ("parent", "SIGINT", -signal.SIGTERM), ("worker", "SIGTERM", 1)],
)
def test_a_signal_to_any_process_of_spawn_saves_and_the_same_command_resumes(
    target: str, reason: str, code: int, by_one_process: str, tmp_path: Path
) -> None:
    run(tmp_path, "true")
    loop = (tmp_path / "loop.py").read_text(encoding="utf-8")
    slow = loop.replace("step.update()\n", "step.update()\n            __import__('halt').at(step.number)\n")
    halt = "import pathlib, time\n\ndef at(n):\n    pathlib.Path(f'step-{n}').touch()\n    time.sleep(0.3)\n"
    (tmp_path / "halt.py").write_text(halt, encoding="utf-8")
    (tmp_path / "loop.py").write_text(slow, encoding="utf-8")
    command = [sys.executable, *BLOCKS[5].split()[1:]]
    assert command[1:] == ["spawn.py", "runs/a"]
    with (tmp_path / "out").open("w") as out:
        started = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out, start_new_session=True)
    while not (tmp_path / "step-3").exists():
        assert started.poll() is None, (tmp_path / "out").read_text()
        time.sleep(0.01)
    ranks = workers(started.pid)
    assert len(ranks) == 2
    if target == "group":
        os.killpg(started.pid, signal.SIGINT)
    else:
        os.kill(started.pid if target == "parent" else ranks[0], signal.SIGTERM)
    assert started.wait() == code
    folder = tmp_path / "runs" / "a"
    while not (folder / "result.json").exists():  # the workers may outlive their parent
        time.sleep(0.01)
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert (result["event"], result["reason"]) == ("stopped", reason)
    while len(list((folder / "checkpoints").glob("step-*"))) != 1 or is_locked(folder) or any(map(is_running, ranks)):
        time.sleep(0.01)
    (tmp_path / "loop.py").write_text(loop, encoding="utf-8")
    resumed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert f"resuming after step {result['step']} from" in resumed.stdout
    assert {weights for _, _, weights in OF_A_RANK.findall(resumed.stdout)} == {by_one_process}


def workers(parent: int) -> list[int]:
    """Return the processes that `mp.spawn` started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8").split()
    return [int(each) for each in children if "spawn_main" in Path(f"/proc/{each}/cmdline").read_text()]


def is_running(process: int) -> bool:
    """Return whether a process exists and isn't a zombie."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
