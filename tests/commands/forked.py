"""Commands as real processes, forked from a server that has imported what they import: most start in 0.1 s, not in 5.

As a program it is that server: it takes requests, a line of JSON each, from the socket whose descriptor is its
argument, and ends with it. Each command gets a session of its own, so that what it leaves behind can be found.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lockstep.reporting import jsonl

TIMEOUT_S = 300.0
MARK = "LOCKSTEP_TEST"  # in the environment of a program and all it starts, whatever session they are in


@dataclass(frozen=True)
class Command:
    """A command that was started, the folder it works in, and `reap`, which returns the exit code of an ended one."""

    pid: int
    folder: Path
    name: str
    mark: str
    reap: Callable[[], int]

    @property
    def out(self) -> str:
        """What it printed so far."""
        return (self.folder / f"{self.name}.out").read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        """What it printed to standard error so far."""
        return (self.folder / f"{self.name}.err").read_text(encoding="utf-8")

    @property
    def sha256(self) -> str:
        """The hash it printed in the end."""
        last = self.out.splitlines()[-1]
        assert last.startswith("weights sha256 "), self.out
        return last.split()[-1]

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for its end and return the exit code; as with subprocess, -N is death by signal N."""
        if not self._ended(timeout_s):
            self.clear_away()
            raise AssertionError(f"{self.name} still ran after {timeout_s} s\n{self.out}\n{self.err}")
        return self.reap()

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition, while the command runs."""
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert not self._ended(0), f"{self.name} ended early\n{self.out}\n{self.err}"
            assert time.monotonic() < end, f"{self.name}: waited in vain\n{self.out}\n{self.err}"
            time.sleep(0.005)

    def until_step(self, step: int, run: str = "run") -> None:
        """Wait until a step is logged."""
        self.until(lambda: step in steps(self.folder / run))

    def signal(self, number: int) -> None:
        """Send a signal to its first process."""
        os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to its process group, as a terminal does."""
        os.killpg(self.pid, number)

    def until_heard(self) -> None:
        """Wait until its first process has dealt with the signals that it was sent.

        Then none waits to be delivered, and it sleeps again: Python acts on a signal before it goes on sleeping.
        """

        def has_heard() -> bool:
            lines = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8").splitlines()
            said = dict(line.split(":", 1) for line in lines)
            waiting = int(said["SigPnd"], 16) | int(said["ShdPnd"], 16)
            return said["State"].split()[0] in ("S", "Z") and not waiting

        self.until(has_heard)

    def workers(self) -> list[int]:
        """Return the processes that its first process started, the oldest first: rank by rank."""
        children = [each for each in _processes() if each.parent == self.pid]
        return [each.pid for each in sorted(children, key=lambda each: (each.started, each.pid))]

    def left(self) -> list[int]:
        """Return the processes of it that do not end, though they have some seconds for it."""
        end = time.monotonic() + 60
        while (found := self._running()) and time.monotonic() < end:
            time.sleep(0.01)
        return found

    def clear_away(self) -> None:
        """Kill whatever of it runs."""
        for pid in self._running():
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, signal.SIGKILL)

    def _ended(self, timeout_s: float) -> bool:
        descriptor = os.pidfd_open(self.pid)
        try:
            return bool(select.select([descriptor], [], [], timeout_s)[0])
        finally:
            os.close(descriptor)

    def _running(self) -> list[int]:
        return [each.pid for each in _processes() if each.session == self.pid or _marked(each.pid, self.mark)]


class Server:
    """The server, seen from a test."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        descriptor = theirs.fileno()
        # Threads that a fork leaves behind would hold locks for ever: the server has none.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # as the command itself begins
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(descriptor)], pass_fds=[descriptor], env=environment
        )
        theirs.close()
        self._answers = self._socket.makefile("r", encoding="utf-8")

    def start(self, name: str, words: tuple[str, ...], folder: Path, env: Mapping[str, str], tty: str = "") -> Command:
        """Start `lockstep` with these words in `folder`; `tty` is the terminal that it gets."""
        request = {"name": name, "words": words, "folder": str(folder), "env": {**os.environ, **env}, "tty": tty}
        for end in ("out", "err"):
            (folder / f"{name}.{end}").touch()  # there before the command is, so that it can be read at any time
        pid = self._ask(request)
        return Command(pid, folder, name, f"{MARK}={pid}", lambda: self._ask({"reap": pid}))

    def load(self, *modules: str) -> None:
        """Import modules that take seconds, once for all commands that start from now on."""
        self._ask({"load": modules})

    def close(self) -> None:
        """End the server."""
        self._answers.close()
        self._socket.close()
        self._process.kill()  # its own end would take seconds
        self._process.wait()

    def _ask(self, request: Mapping[str, Any]) -> int:
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        return int(json.loads(self._answers.readline()))


def program(name: str, words: list[str], folder: Path, env: Mapping[str, str]) -> Command:
    """Start any program, in a session of its own and marked."""
    mark = f"{folder}/{name}"
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with (folder / f"{name}.out").open("w") as out, (folder / f"{name}.err").open("w") as err:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, MARK: mark, **env},
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    return Command(process.pid, folder, name, f"{MARK}={mark}", process.wait)


def imported(*words: str, folder: Path, **env: str) -> set[str]:
    """Return the packages that `lockstep` with these words imports, in a Python of its own."""
    code = """
import sys
from lockstep.cli import main
main(sys.argv[1:], standalone_mode=False)
print(*{name.partition(".")[0] for name in sys.modules})
"""
    line = [sys.executable, "-c", code, *words]
    done = subprocess.run(line, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, check=True)
    return {*done.stdout.splitlines()[-1].split()}


def as_rank(rank: int, size: int, port: int, hosts: int = 1) -> dict[str, str]:
    """Return the variables that tell a process which rank of so many it is, on so many hosts, and where they meet."""
    local = size // hosts
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
    return {name: str(value) for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items()}


def events(run: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of a run that bear a name."""
    return [event for event in jsonl.read_events(run / jsonl.EVENTS) if event["event"] == name]


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Return the figures of a run's evaluations, without what depends on the clock."""
    timed = ("time", "seconds", "samples_per_s", "weight_per_s")
    return [{key: value for key, value in event.items() if key not in timed} for event in events(run, "evaluated")]


def steps(run: Path) -> list[int]:
    """Return the steps that a run has logged so far."""
    return [event["step"] for event in events(run, "step")] if (run / jsonl.EVENTS).exists() else []


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    session: int
    started: int  # in ticks since the machine's start


def _processes() -> Iterator[_Process]:
    """Yield the processes of this machine that are no zombies."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # The name in brackets may hold anything, spaces and brackets too.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            yield _Process(int(entry.name), int(fields[1]), int(fields[3]), int(fields[19]))


def _marked(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def _serve(connection: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's
    _import_what_commands_import()
    gc.freeze()  # what is imported stays: commands need not look through it for garbage
    for line in connection.makefile("r", encoding="utf-8"):
        request = json.loads(line)
        if "reap" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        elif "load" in request:
            answer = len([importlib.import_module(name) for name in request["load"]])
            gc.freeze()
        elif not (answer := os.fork()):
            connection.close()
            _run(request)
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _import_what_commands_import() -> None:
    import tensorboard.compat.proto.event_pb2
    import tensorboard.summary.writer.record_writer  # noqa: F401
    import torch
    import tqdm

    from lockstep.config.load import load
    from lockstep.run import training  # noqa: F401
    from lockstep.setup.build import build_setup

    torch.set_num_threads(1)
    # Torch's tracer makes a bar that nobody sees, with a lock that Python 3.14 frees when a process ends; a forked
    # command ends at once.
    tqdm.tqdm.set_lock(threading.RLock())
    build_setup(load("digits").config.recipe)


def _run(request: dict[str, Any]) -> NoReturn:
    """Be the command."""
    from lockstep.cli import main

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # found anew, by the variables above
    _redirect(request)
    sys.argv = ["lockstep", *request["words"]]
    try:
        main(request["words"], prog_name="lockstep")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _redirect(request: dict[str, Any]) -> None:
    # The first terminal that the leader of a session opens becomes the terminal of the session.
    names = (
        [request["tty"]] * 3
        if request["tty"]
        else ["/dev/null", *(f"{request['name']}.{end}" for end in ("out", "err"))]
    )
    for number, name in enumerate(names):
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
