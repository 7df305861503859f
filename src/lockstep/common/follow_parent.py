"""Processes that end with the one that started them, however that ends.

A child process of this host asks the kernel for it: `die_with_parent`, `die_with_launcher`.

What ssh starts on another host outlives the ssh, but its stdin closes, even where the connection breaks. So
`python -m lockstep.common.follow_parent COMMAND [ARGUMENT]...` runs a command until stdin closes. The command has a
process group of its own: it gets SIGTERM first, and after a while all that is left of the group is killed. After
`--secret` the first line of stdin is the secret of the job, for the environment of the command, as everybody on a host
can read command lines. `--knows HOST` ends it at once if that name has no address there: torchrun would retry for
minutes.

What srun starts does not notice that srun was killed. `lockstep launch` leaves a listening socket to the srun that it
becomes: the kernel keeps connections to it, which nobody need accept, for as long as a process of srun is there. A task
that has one ends with it: `follow_srun`.
"""

import ctypes
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from lockstep.common.hashing import FIXED, VARIABLE
from lockstep.common.rank import SECRET
from lockstep.errors import EXIT_USAGE, TransientError

KNOWS: Final = "--knows"  # a host whose name must have an address where the command is to run
GIVE_ADDRESS: Final = "give an address of it in --endpoint ADDRESS:PORT"
READS_SECRET: Final = "--secret"
STOP_S: Final = 60.0  # for a checkpoint to be written after SIGTERM
_POLL_S: Final = 0.1
_KNOWN_S: Final = 5.0  # for a name to be known: that of a container may come late
_LONGEST: Final = 8192  # bytes of a secret
SRUN_PORT: Final = "LOCKSTEP_SRUN_PORT"  # for the tasks, beside SLURM_SRUN_COMM_HOST, which srun tells them
_TASKS: Final = 4096  # the kernel keeps no more connections that nobody takes
_CONNECT_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1
_FOLLOWED: Final = ("torchrun", "openmpi", "mpich")  # one started by hand may outlive its shell, as with nohup


def run_until_stdin_closes(command: Sequence[str], stdin: int, stop_s: float = STOP_S) -> int:
    """Run a command until it ends, or until the file descriptor `stdin` does; return its exit code, as shells count."""
    process: subprocess.Popen[bytes] | None = None
    asked = False  # to end, which a signal may do before there is a command to pass it on to

    def end(*_: object) -> None:
        nonlocal asked
        asked = True
        if process:
            with suppress(ProcessLookupError):
                process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:  # which the command inherits, as nohup has it
            signal.signal(number, end)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_parent)
    if asked:
        end()

    def watch() -> None:
        while os.read(stdin, 4096):
            pass
        end()
        with suppress(subprocess.TimeoutExpired):
            process.wait(stop_s)
        _kill_group(process.pid)

    threading.Thread(target=watch, daemon=True).start()
    code = None
    while code is None:  # looks up now and then: a signal given to the other thread does not end a wait
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(_POLL_S)
    _kill_group(process.pid)
    return code if code >= 0 else 128 - code


def listening_socket() -> socket.socket:
    """Return a socket for tasks to connect to, which is open until this process ends, and what it becomes by exec."""
    listening = socket.create_server(("", 0), backlog=_TASKS)
    listening.set_inheritable(True)
    return listening


def follow_srun(env: Mapping[str, str], stop_s: float = STOP_S) -> None:
    """End this process, by SIGTERM and after a while by SIGKILL, when the srun that `lockstep launch` became is gone.

    `env` says where that is; without it, nothing is done. Called by the main thread.
    """
    host, port = env.get("SLURM_SRUN_COMM_HOST"), env.get(SRUN_PORT)
    if not (host and port):
        return
    main_thread = threading.get_ident()

    def watch() -> None:
        try:
            with socket.create_connection((host, int(port)), _CONNECT_S) as line, suppress(ConnectionError):
                line.settimeout(None)
                line.recv(1)
        except ConnectionRefusedError:  # gone already
            pass
        except OSError as error:
            if env.get("SLURM_PROCID") == "0":
                sys.stderr.write(f"srun at {host}:{port}: {error}; should it be killed, end its tasks by scancel\n")
            return
        signal.pthread_kill(main_thread, signal.SIGTERM)
        time.sleep(stop_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def host_problem(host: str, stop_s: float = _KNOWN_S) -> str:
    """Return the problem of a host name that has no address on this host for so long; "" where there is none."""
    until = time.monotonic() + stop_s
    while True:
        try:
            socket.getaddrinfo(host, None)
        except socket.gaierror as error:
            if time.monotonic() < until:
                time.sleep(_POLL_S)
                continue
            return (
                f"{socket.gethostname()} does not know the host {host}, where the processes of the job are to meet "
                f"({error.strerror})"
            )
        return ""


def _take_secret(stdin: int) -> None:
    """Put the first line of stdin into the environment. Read byte by byte: what follows it is the command's."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(stdin, 1)
        if not byte or len(line) > _LONGEST:
            sys.exit(
                f"{READS_SECRET}: expected a line with the secret of the job on stdin; start it by lockstep launch"
            )
        line += byte
    os.environb[SECRET.encode()] = line[:-1]


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, even by SIGKILL.

    Elsewhere than on Linux a thread ends it soon after its parent.
    """
    known = multiprocessing.parent_process()  # from before the fork, where Python made this process
    parent = known.pid if known else os.getppid()
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except AttributeError:  # not Linux
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


def die_with_launcher(launcher: str) -> None:
    """Let this process end with the launcher that started it; where that is gone already, raise TransientError.

    It is the first thing to do: only then is it the launcher that is the parent.
    """
    if launcher not in _FOLLOWED:
        return
    die_with_parent()
    if os.getppid() == 1 and _is_orphan(launcher):
        raise TransientError(f"the launcher that started this process ({launcher}) is gone")


def parent_command() -> list[str]:
    """Return the command line of the process that started this one; empty where there is no telling."""
    import psutil  # only now: `lockstep --help` need not wait for it

    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:  # gone, or not ours to see
        return []


def _is_orphan(launcher: str) -> bool:
    """Return whether process 1 is the parent of this one because it takes the children of those that are gone.

    In a container torchrun itself may be process 1, or a Python that once started it; under MPI a container for each
    rank may have an init of its own.
    """
    if launcher == "torchrun":
        return not (any("python" in word for word in parent_command()[:1]) and _has_torch(1))
    return _nobody_reads(1)


def _has_torch(pid: int) -> bool:
    """Return whether a process has loaded torch; True where that is not ours to see."""
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return True


def _nobody_reads(descriptor: int) -> bool:
    """Return whether what is written there, as by a rank for its mpirun, is lost."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))  # an error or a hang-up: nothing else was asked for


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == [READS_SECRET]:
        _take_secret(sys.stdin.fileno())
        words = words[1:]
    if words[:1] == [KNOWS]:
        if problem := host_problem(words[1]):
            sys.stderr.write(f"error: {problem}; {GIVE_ADDRESS}\n")
            sys.exit(EXIT_USAGE)
        words = words[2:]
    os.environ.setdefault(VARIABLE, FIXED)  # ssh passes no environment on
    sys.exit(run_until_stdin_closes(words, sys.stdin.fileno()))
