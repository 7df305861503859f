"""A command tied to whoever started it: `python -m lockstep.tether COMMAND [ARGUMENT]...` ends it when stdin ends.

What ssh starts on another host goes on when the ssh is gone; but its stdin ends, however the ssh came to its end, and
so do broken connections. The command has a process group of its own: it is asked to end by SIGTERM, and after a while
all that is left of the group is killed. After `--secret` the first line of stdin is the secret of the job, which the
command gets in its environment: command lines can be read by everybody on a host. `--knows HOST` ends it at once where
that name stands for no address: torchrun would look for one for minutes.

What srun starts hears nothing of the end of srun, if that is killed. `lockstep launch` leaves a listening socket to the
srun that it becomes: as long as a process of srun is there the kernel keeps connections to it, and nobody need take
them. A task that has one ends with it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from lockstep.core.rank import SECRET
from lockstep.errors import EXIT_USAGE
from lockstep.launchers.job import KNOWS, READS_SECRET
from lockstep.parent import die_with_parent

_LOOK_S: Final = 0.1
_KNOWN_S: Final = 5.0  # that a name may take to be known
_LONGEST: Final = 8192  # bytes of a secret
PATIENCE_S: Final = 60.0  # for a checkpoint to be written after SIGTERM
SRUN_PORT: Final = "LOCKSTEP_SRUN_PORT"  # for the tasks, beside SLURM_SRUN_COMM_HOST, which srun tells them
_TASKS: Final = 4096  # the kernel keeps no more connections that nobody takes
_REACH_S: Final = 10.0


def tied(command: Sequence[str], stdin: int, patience_s: float = PATIENCE_S) -> int:
    """Run a command until it ends, or until the file descriptor `stdin` does; return its exit code, as shells count."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_parent)

    def end(*_: object) -> None:
        with suppress(ProcessLookupError):
            process.terminate()

    def watch() -> None:
        while os.read(stdin, 4096):
            pass
        end()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
        _kill_group(process.pid)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, end)
    threading.Thread(target=watch, daemon=True).start()
    code = None
    while code is None:  # looks up now and then: a signal given to the other thread does not end a wait
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(_LOOK_S)
    _kill_group(process.pid)
    return code if code >= 0 else 128 - code


def held() -> socket.socket:
    """Return a socket to which tasks are tied, by its port, until this process ends and what it becomes by exec."""
    listening = socket.create_server(("", 0), backlog=_TASKS)
    listening.set_inheritable(True)
    return listening


def tie(env: Mapping[str, str], patience_s: float = PATIENCE_S) -> None:
    """End this process, by SIGTERM and after a while by SIGKILL, when the srun that `lockstep launch` became is gone.

    `env` says where that is; without it, nothing is done. Called by the main thread.
    """
    host, port = env.get("SLURM_SRUN_COMM_HOST"), env.get(SRUN_PORT)
    if not (host and port):
        return
    tied_by = threading.get_ident()

    def watch() -> None:
        try:
            with socket.create_connection((host, int(port)), _REACH_S) as line, suppress(ConnectionError):
                line.settimeout(None)
                line.recv(1)
        except ConnectionRefusedError:  # gone already
            pass
        except OSError as error:
            if env.get("SLURM_PROCID") == "0":
                sys.stderr.write(f"srun at {host}:{port}: {error}; should it be killed, end its tasks by scancel\n")
            return
        signal.pthread_kill(tied_by, signal.SIGTERM)
        time.sleep(patience_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def problem_of(host: str, patience_s: float = _KNOWN_S) -> str:
    """Return the problem of a name that stands for no address on this host for so long; "" where there is none."""
    until = time.monotonic() + patience_s
    while True:
        try:
            socket.getaddrinfo(host, None)
        except socket.gaierror as error:
            if time.monotonic() < until:
                time.sleep(_LOOK_S)
                continue
            return (
                f"{socket.gethostname()} does not know the host {host}, where the agents of torchrun are to meet "
                f"({error.strerror}); give an address of it in --endpoint ADDRESS:PORT"
            )
        return ""


def _take_secret(stdin: int) -> None:
    """Put the first line of stdin into the environment. Read byte by byte: what follows it is for `tied`."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(stdin, 1)
        if not byte or len(line) > _LONGEST:
            sys.exit(
                f"{READS_SECRET}: expected a line with the secret of the job on stdin; start it by lockstep launch"
            )
        line += byte
    os.environb[SECRET.encode()] = line[:-1]


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == [READS_SECRET]:
        _take_secret(sys.stdin.fileno())
        words = words[1:]
    if words[:1] == [KNOWS]:
        if problem := problem_of(words[1]):
            sys.stderr.write(f"error: {problem}\n")
            sys.exit(EXIT_USAGE)
        words = words[2:]
    sys.exit(tied(words, sys.stdin.fileno()))
