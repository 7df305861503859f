"""Runs that are told to stop, or killed: what they save, the code they end with, and that nothing of them is left."""

import os
import pty
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import DIGITS, FOLDER, held_at
from forked import events
from held import HELD, HOLD, hold

from lockstep.common.interrupts import DUPLICATES_S

pytestmark = pytest.mark.slow("runs whole commands")

TRAIN = ("train", *DIGITS, "run.dir=run", "run.save_every.steps=5")
BEFORE_TRAINING = "before training: nothing was saved, and the same command starts again"
PAIRS = pytest.mark.slow("each of its values goes with one of the others, here and in scripts/prove-kills")


def assert_goes_on(run, finished, processes: int) -> None:
    resumed = run(*TRAIN, f"placement.processes={processes}")
    assert resumed.sha256 == finished("recipe.microbatches=4", "placement.processes=1").sha256


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """Return a folder for temporary files, and see that it is empty in the end."""
    (tmp_path / "tmp").mkdir()
    yield tmp_path / "tmp"
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("processes", "number", "code"),
    [
        (1, signal.SIGINT, 130),
        (2, signal.SIGTERM, 75),
        (1, signal.SIGUSR1, 75),
        pytest.param(2, signal.SIGINT, 130, marks=PAIRS),
        pytest.param(1, signal.SIGTERM, 75, marks=PAIRS),
        pytest.param(2, signal.SIGUSR1, 75, marks=PAIRS),
    ],
)
def test_the_step_is_finished_and_saved(start, run, finished, temporary, processes, number, code):
    command = held_at(start, 7, *TRAIN, f"placement.processes={processes}", TMPDIR=str(temporary))
    command.signal_group(number)
    command.until_heard()  # and passed on: steps take less time than a busy machine may let the agent wait
    HOLD.unlink()
    assert command.wait() == code, command.err
    (stopped,) = events(command.folder / "run", "stopped")
    saved = events(command.folder / "run", "saved")[-1]
    assert stopped["reason"] == number.name
    assert 7 <= stopped["step"] <= 9  # ranks agree one step later
    assert saved["step"] == stopped["step"]
    assert f"after step {saved['step']}; to resume, run the same command with run.dir=run" in command.out
    assert command.err == ""
    assert command.left() == []
    assert_goes_on(run, finished, 3 - processes)


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ("train", signal.SIGTERM, -signal.SIGTERM),
        ("train", signal.SIGINT, 130),
        pytest.param("train", signal.SIGUSR1, -signal.SIGUSR1, marks=PAIRS),
        pytest.param("compare", signal.SIGTERM, -signal.SIGTERM, marks=PAIRS),
        ("compare", signal.SIGINT, 130),
    ],
)
def test_a_run_that_is_stopped_while_it_prepares_says_that_nothing_is_saved(start, tmp_path, command, number, code):
    (tmp_path / "waiting.py").write_text(
        'import time\nfrom pathlib import Path\n\nPath("waits").touch()\nwhile True:\n    time.sleep(0.01)\n'
    )
    stopped = start(command, "digits", 'recipe.model={name: "waiting:net"}')
    stopped.until((tmp_path / "waits").exists)
    stopped.signal(number)
    assert stopped.wait() == code
    lines = (stopped.out + stopped.err).splitlines()
    assert lines[0].startswith("preparing digits: ")
    assert lines[1:] == [f"stopped by {number.name} {BEFORE_TRAINING}"]
    assert stopped.out == (f"{lines[0]}\n" if command == "train" else "")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_worker_is_forked_ends_the_run(start, tmp_path, number):
    """Python ignores exceptions of callbacks of os.fork, and the worker isn't known yet."""
    (tmp_path / "forking.py").write_text(f"""import os
from held import linear
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), {int(number)}))
""")
    model = ('recipe.model={name: "forking:linear"}', "recipe.epochs=", "recipe.steps=1", "placement.processes=2")
    stopped = start("train", "digits", *model, "run.dir=run", "run.tensorboard=false", "run.probe=off")
    assert stopped.wait() == 128 + number
    assert "ignored" not in stopped.err
    assert stopped.left() == []


def test_workers_that_are_stopped_before_they_train_leave_a_folder_that_starts_again(start, run, tmp_path):
    waiting = """import os
import time
from pathlib import Path

from held import linear


def wait():
    Path("waits").touch()
    while True:
        time.sleep(0.01)


if not Path("waits").exists():
    os.register_at_fork(after_in_child=wait)
"""
    (tmp_path / "waiting.py").write_text(waiting)
    model = ('recipe.model={name: "waiting:linear"}', "recipe.epochs=", "recipe.steps=1", "placement.processes=2")
    words = ("train", "digits", *model, "run.dir=run", "run.tensorboard=false", "run.probe=off")
    stopped = start(*words)
    stopped.until((tmp_path / "waits").exists)
    stopped.signal(signal.SIGTERM)
    assert stopped.wait() == 143
    assert stopped.err.splitlines() == [
        "ended by SIGTERM",
        f"stopped by SIGTERM {BEFORE_TRAINING}",
    ]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["lock", "result.json"]
    assert run(*words).out.splitlines()[-1].startswith("weights sha256 ")


@pytest.mark.parametrize("processes", [pytest.param(1, marks=PAIRS), 2])
def test_a_second_ctrl_c_ends_at_once(start, run, finished, temporary, processes):
    command = held_at(start, 7, *TRAIN, f"placement.processes={processes}", TMPDIR=str(temporary))
    command.signal_group(signal.SIGINT)
    command.until_heard()
    time.sleep(DUPLICATES_S)  # an earlier signal is a copy of the first
    command.signal_group(signal.SIGINT)
    assert command.wait() == 130
    assert command.left() == []
    HOLD.unlink()
    assert events(command.folder / "run", "saved")[-1]["step"] == 5
    assert_goes_on(run, finished, 3 - processes)


@pytest.mark.usefixtures("images")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), *(pytest.param(each, 75, marks=PAIRS) for each in (signal.SIGTERM, signal.SIGUSR1))],
)
def test_loader_processes_leave_the_end_to_the_run(start, run, number, code):
    words = (*TRAIN, *FOLDER, "recipe.epochs=4", "placement={processes: 1, workers: 2}")
    command = held_at(start, 2, *words)
    command.signal_group(number)
    HOLD.unlink()
    assert command.wait() == code, command.err
    assert command.left() == []
    assert run(*words).sha256 == run(*words, "run.dir=undisturbed").sha256


def test_ctrl_c_in_a_terminal(start, run, finished):
    master, terminal = pty.openpty()
    command = held_at(start, 7, *TRAIN, "placement.processes=2", tty=os.ttyname(terminal))
    os.write(master, b"\x03")
    HOLD.unlink()
    assert command.wait() == 130
    assert command.left() == []
    os.close(terminal)
    shown = b"".join(_pieces(master)).decode()
    os.close(master)
    assert "stopped by SIGINT after step" in shown
    assert "Traceback" not in shown
    assert_goes_on(run, finished, 1)


@pytest.mark.parametrize("rank", [0, *(pytest.param(each, marks=PAIRS) for each in (1, 2))])
def test_a_killed_worker_is_named_and_ends_the_others(start, run, finished, temporary, rank):
    command = held_at(start, 7, *TRAIN, "placement.processes=3", TMPDIR=str(temporary))
    os.kill(command.workers()[rank], signal.SIGKILL)
    HOLD.unlink()
    assert command.wait() == 1
    line, log = command.err.splitlines()
    assert line.startswith(f"[rank {rank} of 3, ")
    assert log == f"  its log: run/logs/rank-{rank}.log"
    # What memory it had is looked at twice a second, and so may not be known yet.
    assert re.search(
        r"\] error: was killed by SIGKILL( \(it used up to \d+ MiB\))?; the other ranks were stopped\.", line
    )
    assert command.left() == []
    assert_goes_on(run, finished, 2)


@pytest.mark.parametrize(
    ("strategy", "rank"),
    [
        ("zero2", 1),
        ("zero3", 0),
        ("pipeline", 1),
        *(pytest.param(*each, marks=PAIRS) for each in (("zero2", 0), ("zero3", 1), ("hsdp", 0), ("hsdp", 1))),
    ],
)
def test_whatever_a_strategy_exchanges_the_killed_rank_is_named_and_no_other(start, strategy, rank):
    """`scripts/prove-kills --named` has more of it. The survivors fail too, in exchanges that torch makes by itself."""
    processes = 4 if strategy == "hsdp" else 2
    words = ("recipe.epochs=20", f"placement.processes={processes}", f"placement.strategy={strategy}")
    command = start(*TRAIN, *words)
    command.until_step(2)
    os.kill(command.workers()[rank], signal.SIGKILL)
    assert command.wait() == 1
    line, log = command.err.splitlines()
    assert line.startswith(f"[rank {rank} of {processes}, ")
    assert "] error: was killed by SIGKILL" in line
    assert log == f"  its log: run/logs/rank-{rank}.log"
    survivor = (command.folder / "run" / "logs" / f"rank-{1 - rank}.log").read_text(encoding="utf-8")
    assert "Traceback" in survivor


def test_a_worker_that_exits_with_0_has_not_trained(run):
    command = run(*TRAIN, 'recipe.loss={name: "ending:leaving"}', "placement.processes=2", code=1)
    line, _ = command.err.splitlines()
    assert "] error: exited with code 0 before it finished; the other ranks were stopped." in line


@pytest.mark.parametrize("processes", [pytest.param(1, marks=PAIRS), 2])
def test_a_closed_terminal_stops_a_run_and_it_is_saved(start, run, finished, processes):
    """It sends SIGHUP, and nothing can be written to it any more."""
    master, terminal = pty.openpty()
    command = held_at(start, 7, *TRAIN, f"placement.processes={processes}", tty=os.ttyname(terminal))
    os.close(terminal)
    os.close(master)
    command.until_heard()
    HOLD.unlink()
    assert command.wait() == 75
    assert command.left() == []
    (stopped,) = events(command.folder / "run", "stopped")
    assert stopped["reason"] == "SIGHUP"
    log = (command.folder / "run" / "logs" / "rank-0.log").read_text(encoding="utf-8")
    assert log.endswith(
        f"stopped by SIGHUP after step {stopped['step']}; to resume, run the same command with run.dir=run\n"
    )
    assert_goes_on(run, finished, 3 - processes)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=PAIRS)])
def test_a_terminal_that_takes_nothing_ends_no_run(start, finished, processes):
    command = start(*TRAIN, f"placement.processes={processes}", tty="/dev/full")
    assert command.wait() == 0
    log = (command.folder / "run" / "logs" / "rank-0.log").read_text(encoding="utf-8")
    assert log.splitlines()[-1].split()[-1] == finished("recipe.microbatches=4", "placement.processes=1").sha256


def test_sigquit_ends_all_at_once(start):
    command = held_at(start, 7, *TRAIN, "placement.processes=2")
    command.signal(signal.SIGQUIT)
    assert command.wait() == -signal.SIGQUIT
    assert (command.err, command.left()) == ("", [])


@pytest.mark.parametrize("processes", [pytest.param(1, marks=PAIRS), 3])
def test_a_killed_parent_leaves_no_process_and_no_lock(start, run, finished, tmp_path, processes):
    command = held_at(start, 7, *TRAIN, f"placement.processes={processes}", TMPDIR=str(tmp_path))
    command.signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    assert command.left() == []
    HOLD.unlink()
    assert_goes_on(run, finished, 2)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        *(pytest.param(*each, marks=PAIRS) for each in ((signal.SIGUSR1, 138), (signal.SIGINT, 130))),
    ],
)
def test_an_evaluation_has_nothing_to_save_and_ends_at_once(start, run, temporary, number, code):
    run(*TRAIN, "recipe.epochs=", "recipe.steps=2", "placement.processes=2")
    hold("run", 2)
    command = start("eval", "--trust", "run", "placement.processes=2", TMPDIR=str(temporary))
    command.until(HELD.exists)
    command.signal(number)
    assert command.wait() == code
    assert command.err == f"ended by {number.name}\n"
    assert command.left() == []


def _pieces(master: int) -> Iterator[bytes]:
    """Yield what was written to a terminal that all have closed; a read gives no more than 4 KiB of it."""
    with suppress(OSError):
        while piece := os.read(master, 1 << 16):
            yield piece
