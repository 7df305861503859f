"""Ends a child process when its parent process ends, no matter how the parent ends.

On the same host, `die_with_parent` and `die_with_launcher` ask the kernel to end the child.

A process that ssh starts on a remote host outlives the ssh process. However, its stdin closes when ssh ends or the
connection breaks. Therefore, `python -m lockstep.common.follow_parent COMMAND [ARGUMENT]...` runs a command until stdin
closes. The command runs in a separate process group. When stdin closes, the command receives SIGTERM. When the command
has exited, or after STOP_S seconds, the rest of the process group is killed. There are two options:

- `--secret`: Read the secret of the job from the first line of stdin, and pass it to the command in an environment
  variable. The secret isn't an argument, because all users of a host can read command lines.
- `--knows HOST`: Exit immediately if this host can't resolve HOST. Otherwise, torchrun would retry for minutes.

A task that srun starts doesn't notice if srun is killed. Therefore, `lockstep launch` opens a listening socket before
exec replaces it with srun, which inherits the socket. The kernel keeps connections to this socket open while an srun
process exists, even if the connections are never accepted. Each task opens such a connection, and ends when the
connection breaks (`follow_srun`).
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

from lockstep.common.hashing import FIXED_SEED, SEED_VARIABLE
from lockstep.common.rank import SECRET
from lockstep.errors import EXIT_USAGE, TransientError

RESOLVE_FLAG: Final = "--knows"  # option of this module, followed by the host name to resolve
ADDRESS_ADVICE: Final = "pass its address in --endpoint ADDRESS:PORT"
SECRET_FLAG: Final = "--secret"
STOP_S: Final = 60.0  # time to save a checkpoint after SIGTERM
_POLL_S: Final = 0.1
_RESOLVE_TIMEOUT_S: Final = 5.0
_MAX_SECRET_BYTES: Final = 8192  # maximum length of a secret in bytes
SRUN_PORT: Final = "LOCKSTEP_SRUN_PORT"  # read by the tasks, together with SLURM_SRUN_COMM_HOST, which srun sets
_BACKLOG: Final = 4096  # maximum number of connections, which are never accepted
_CONNECT_TIMEOUT_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1
# Manually started processes aren't included, because they may outlive their shell (nohup).
_FOLLOWED_LAUNCHERS: Final = ("torchrun", "openmpi", "mpich")


def run_until_stdin_closes(command: Sequence[str], stdin: int, stop_s: float = STOP_S) -> int:
    """Run a command until it exits or the file descriptor `stdin` closes. Return its exit code.

    As in a shell, the exit code is 128 + N if signal N ended the command.
    """
    process: subprocess.Popen[bytes] | None = None
    signaled = False  # set when a signal arrives, possibly before the command is started

    def terminate(*_: object) -> None:
        nonlocal signaled
        signaled = True
        if process:
            with suppress(ProcessLookupError):
                process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:  # the command inherits ignored signals, e.g. from nohup
            signal.signal(number, terminate)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_parent)
    if signaled:
        terminate()

    def watch_stdin() -> None:
        while os.read(stdin, 4096):
            pass
        terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(stop_s)
        _kill_group(process.pid)

    threading.Thread(target=watch_stdin, daemon=True).start()
    code = None
    while code is None:  # poll, because a signal to the other thread doesn't interrupt a wait
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(_POLL_S)
    _kill_group(process.pid)
    return code if code >= 0 else 128 - code


def open_listening_socket() -> socket.socket:
    """Return a listening socket for `follow_srun`. The socket stays open across exec, until this process ends."""
    listener = socket.create_server(("", 0), backlog=_BACKLOG)
    listener.set_inheritable(True)
    return listener


def follow_srun(env: Mapping[str, str], stop_s: float = STOP_S) -> None:
    """Arrange for this process to end when its srun process ends. Sends SIGTERM, and SIGKILL after `stop_s` seconds.

    `env` contains the address of the socket that srun inherited from `lockstep launch`. Without an address, this
    function is a no-op. Call it from the main thread, which receives SIGTERM.
    """
    host, port = env.get("SLURM_SRUN_COMM_HOST"), env.get(SRUN_PORT)
    if not (host and port):
        return
    main_thread = threading.get_ident()

    def watch_srun() -> None:
        try:
            with (
                socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S) as connection,
                suppress(ConnectionError),
            ):
                connection.settimeout(None)
                connection.recv(1)
        except ConnectionRefusedError:  # srun has already ended
            pass
        except OSError as error:
            if env.get("SLURM_PROCID") == "0":
                sys.stderr.write(f"cannot watch srun at {host}:{port}: {error}; if it is killed, use scancel\n")
            return
        signal.pthread_kill(main_thread, signal.SIGTERM)
        time.sleep(stop_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch_srun, daemon=True).start()


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def check_host_resolves(host: str, timeout_s: float = _RESOLVE_TIMEOUT_S) -> str:
    """Return an error message if this host can't resolve `host` within `timeout_s` seconds, or else "".

    Container names may only resolve after a delay.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.getaddrinfo(host, None)
        except socket.gaierror as error:
            if time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
            return (
                f"{socket.gethostname()} cannot resolve host {host}, the rendezvous host of the job ({error.strerror})"
            )
        return ""


def _export_secret(stdin: int) -> None:
    """Read the job secret from the first line of stdin, and set its environment variable. Reads no further lines."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(stdin, 1)
        if not byte or len(line) > _MAX_SECRET_BYTES:
            sys.exit(
                f"{SECRET_FLAG}: expected a line with the secret of the job on stdin; start it with lockstep launch"
            )
        line += byte
    os.environb[SECRET.encode()] = line[:-1]


def die_with_parent() -> None:
    """Arrange for the kernel to kill this process when its parent ends, even if the parent is killed.

    On Linux, the parent is the thread that started this process. On other systems, a thread of this process polls until
    the parent process has ended.
    """
    # multiprocessing records the parent before the fork. getppid may already return a different process.
    parent_process = multiprocessing.parent_process()
    parent = parent_process.pid if parent_process else os.getppid()
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except AttributeError:  # not Linux
        threading.Thread(target=_exit_after_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)


def _exit_after_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_POLL_S)
    os._exit(1)


def die_with_launcher(launcher: str) -> None:
    """Arrange for this process to be killed when its launcher ends. Raises TransientError if the launcher is gone.

    Call this function first, while the launcher is still the parent of this process.
    """
    if launcher not in _FOLLOWED_LAUNCHERS:
        return
    die_with_parent()
    if os.getppid() == 1 and _is_orphan(launcher):
        raise TransientError(f"the launcher that started this process ({launcher}) is gone")


def read_parent_command() -> list[str]:
    """Return the command line of the parent process, or an empty list if it can't be read."""
    import psutil  # imported lazily, so that `lockstep --help` is fast

    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:  # the process is gone, or access is denied
        return []


def _is_orphan(launcher: str) -> bool:
    """Return whether this process, a child of process 1, was reparented to process 1 because its launcher is gone.

    In a container, process 1 can be torchrun itself, or a Python process that started torchrun. With MPI, each rank may
    run in a container with a separate init process.
    """
    if launcher == "torchrun":
        return not (any("python" in word for word in read_parent_command()[:1]) and _has_torch(1))
    return _is_reader_gone(1)


def _has_torch(pid: int) -> bool:
    """Return whether a process has loaded torch. Returns True if access is denied."""
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return True


def _is_reader_gone(descriptor: int) -> bool:
    """Return whether no process reads from a pipe anymore, such as the pipe from which mpirun reads a rank's output."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))  # the mask 0 only reports errors and hang-ups


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == [SECRET_FLAG]:
        _export_secret(sys.stdin.fileno())
        arguments = arguments[1:]
    if arguments[:1] == [RESOLVE_FLAG]:
        if problem := check_host_resolves(arguments[1]):
            sys.stderr.write(f"error: {problem}; {ADDRESS_ADVICE}\n")
            sys.exit(EXIT_USAGE)
        arguments = arguments[2:]
    os.environ.setdefault(SEED_VARIABLE, FIXED_SEED)  # ssh doesn't forward PYTHONHASHSEED
    sys.exit(run_until_stdin_closes(arguments, sys.stdin.fileno()))
