"""Ends a child process when its parent process ends, no matter how the parent ends.

On the same host, `die_with_parent` and `die_with_launcher` ask the kernel to end the child.

A process that ssh starts on a different host outlives the ssh process. However, its stdin closes, even if the
connection breaks. Therefore, `python -m lockstep.common.follow_parent COMMAND [ARGUMENT]...` runs a command until stdin
closes. The command runs in a separate process group. When stdin closes, the command receives SIGTERM. After a while,
the rest of the process group is killed. There are two options:

- `--secret`: Read the secret of the job from the first line of stdin, and pass the secret to the command in an
  environment variable, because all users of a host can read command lines.
- `--knows HOST`: Exit immediately if this host can't resolve HOST. Otherwise, torchrun would retry for minutes.

A task that srun starts doesn't notice if srun is killed. `lockstep launch` becomes srun through exec, and srun inherits
a listening socket. The kernel keeps connections to this socket open while an srun process exists, even if the
connections are never accepted. Each task opens such a connection, and ends when the connection breaks: `follow_srun`.
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

RESOLVE_FLAG: Final = "--knows"  # option of this module; followed by the host name to resolve
GIVE_ADDRESS: Final = "pass its address in --endpoint ADDRESS:PORT"
READS_SECRET: Final = "--secret"
STOP_S: Final = 60.0  # time to save a checkpoint after SIGTERM
_POLL_S: Final = 0.1
_RESOLVE_TIMEOUT_S: Final = 5.0  # maximum time until a name resolves; container names may only resolve after a delay
_MAX_SECRET_BYTES: Final = 8192  # maximum length of a secret in bytes
SRUN_PORT: Final = "LOCKSTEP_SRUN_PORT"  # read by the tasks, together with SLURM_SRUN_COMM_HOST, which srun sets
_BACKLOG: Final = 4096  # maximum number of connections that aren't accepted yet
_CONNECT_TIMEOUT_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1
# A manually started process may outlive its shell (nohup).
_FOLLOWED_LAUNCHERS: Final = ("torchrun", "openmpi", "mpich")


def run_until_stdin_closes(command: Sequence[str], stdin: int, stop_s: float = STOP_S) -> int:
    """Run a command until it exits or the file descriptor `stdin` closes. Return its exit code as a shell would."""
    process: subprocess.Popen[bytes] | None = None
    signaled = False  # whether a signal arrived, possibly before the command was started

    def end(*_: object) -> None:
        nonlocal signaled
        signaled = True
        if process:
            with suppress(ProcessLookupError):
                process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:  # the command inherits ignored signals, e.g. from nohup
            signal.signal(number, end)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_parent)
    if signaled:
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
    while code is None:  # poll, because a signal to the other thread doesn't interrupt a wait
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(_POLL_S)
    _kill_group(process.pid)
    return code if code >= 0 else 128 - code


def listening_socket() -> socket.socket:
    """Return a socket that tasks connect to. The socket stays open across exec until this process ends."""
    listening = socket.create_server(("", 0), backlog=_BACKLOG)
    listening.set_inheritable(True)
    return listening


def follow_srun(env: Mapping[str, str], stop_s: float = STOP_S) -> None:
    """End this process when its srun is gone: send SIGTERM to this process, and SIGKILL after `stop_s` seconds.

    `lockstep launch` becomes srun, whose address is in `env`. If `env` has no address, this function is a no-op. Call
    this function from the main thread.
    """
    host, port = env.get("SLURM_SRUN_COMM_HOST"), env.get(SRUN_PORT)
    if not (host and port):
        return
    main_thread = threading.get_ident()

    def watch() -> None:
        try:
            with socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S) as line, suppress(ConnectionError):
                line.settimeout(None)
                line.recv(1)
        except ConnectionRefusedError:  # srun is already gone
            pass
        except OSError as error:
            if env.get("SLURM_PROCID") == "0":
                sys.stderr.write(f"cannot watch srun at {host}:{port}: {error}; if it is killed, use scancel\n")
            return
        signal.pthread_kill(main_thread, signal.SIGTERM)
        time.sleep(stop_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def host_problem(host: str, stop_s: float = _RESOLVE_TIMEOUT_S) -> str:
    """Return a message if this host can't resolve a host name within `stop_s` seconds, or else an empty string."""
    deadline = time.monotonic() + stop_s
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
    """Store the first line of stdin in the environment. Reads byte by byte, so that the rest of stdin stays unread."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(stdin, 1)
        if not byte or len(line) > _MAX_SECRET_BYTES:
            sys.exit(
                f"{READS_SECRET}: expected a line with the secret of the job on stdin; start it with lockstep launch"
            )
        line += byte
    os.environb[SECRET.encode()] = line[:-1]


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the parent thread ends, even if SIGKILL ends the parent.

    On systems other than Linux, a thread ends this process soon after its parent.
    """
    # If multiprocessing started this process, the parent was recorded before the fork.
    parent_process = multiprocessing.parent_process()
    parent = parent_process.pid if parent_process else os.getppid()
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except AttributeError:  # not Linux
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


def die_with_launcher(launcher: str) -> None:
    """End this process together with the launcher that started it. Raises TransientError if the launcher is gone.

    Call this function first, while the launcher is still the parent of this process.
    """
    if launcher not in _FOLLOWED_LAUNCHERS:
        return
    die_with_parent()
    if os.getppid() == 1 and _is_orphan(launcher):
        raise TransientError(f"the launcher that started this process ({launcher}) is gone")


def parent_command() -> list[str]:
    """Return the command line of the parent process, or an empty list if it can't be read."""
    import psutil  # imported lazily, so that `lockstep --help` is fast

    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:  # the process is gone, or access is denied
        return []


def _is_orphan(launcher: str) -> bool:
    """Return whether this process, whose parent is process 1, was reparented to init because its launcher is gone.

    In a container, process 1 can be torchrun itself, or a Python process that started torchrun. With MPI, each rank may
    run in a container with a separate init process.
    """
    if launcher == "torchrun":
        return not (any("python" in word for word in parent_command()[:1]) and _has_torch(1))
    return _reader_is_gone(1)


def _has_torch(pid: int) -> bool:
    """Return whether a process has loaded torch. Returns True if access is denied."""
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return True


def _reader_is_gone(descriptor: int) -> bool:
    """Return whether the reader of a file descriptor, such as the mpirun of a rank, is gone."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))  # the mask 0 only reports errors and hang-ups


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == [READS_SECRET]:
        _export_secret(sys.stdin.fileno())
        arguments = arguments[1:]
    if arguments[:1] == [RESOLVE_FLAG]:
        if problem := host_problem(arguments[1]):
            sys.stderr.write(f"error: {problem}; {GIVE_ADDRESS}\n")
            sys.exit(EXIT_USAGE)
        arguments = arguments[2:]
    os.environ.setdefault(VARIABLE, FIXED)  # ssh doesn't forward PYTHONHASHSEED
    sys.exit(run_until_stdin_closes(arguments, sys.stdin.fileno()))
