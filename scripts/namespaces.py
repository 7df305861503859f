"""A script that goes on in namespaces of its own, where it is called once more as process 1.

Its mounts, shared memory and processes are private: no file is left, and the kernel ends every process with the script,
however that comes about. Needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

PROGRAMS = ("setpriv", "unshare", "mount")
PRIVATE = ("setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def run(inside: Callable[[], int], programs: Sequence[str], packages: str, options: Sequence[str] = ()) -> int:
    """Return what `inside` returns in the namespaces, to which `options` of unshare add others, or 2 after a refusal.

    `programs` are those it needs, and `packages` of Debian have them.
    """
    os.environ["PATH"] = _path()
    missing = [program for program in (*PROGRAMS, *programs) if not shutil.which(program)]
    if missing:
        return refused(f"not found: {', '.join(missing)}; install {packages}")
    if os.geteuid():
        return refused("needs root, for mounts and processes of its own")
    if os.getpid() == 1:
        signal.signal(signal.SIGINT, _leave_to_the_command)
        # Names there have process numbers in them, as faketime's, and ours begin at 1: another's could be in the way.
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
        return as_shells_count(inside())
    with subprocess.Popen([*PRIVATE, *options, sys.executable, *sys.argv]) as process:
        signal.signal(signal.SIGINT, _leave_to_the_command)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: process.kill())  # and with it all that is inside
        return as_shells_count(process.wait())


def call(command: Sequence[str]) -> int:
    """Run a command as process 1 and return its exit code. Those who outlive a parent are no zombies."""
    process = subprocess.Popen(command)
    while process.returncode is None:
        pid, status = os.wait()
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode


def refused(reason: str) -> int:
    """Say why the script does nothing, and return its exit code."""
    print(f"{Path(sys.argv[0]).name}: {reason}", file=sys.stderr)
    return 2


def as_shells_count(code: int) -> int:
    """Return the exit code of a process as a shell has it: 128 and the number of the signal that killed it."""
    return code if code >= 0 else 128 - code


def _leave_to_the_command(*_: object) -> None:
    """Ctrl-C reaches the command too, and we end when it does."""


def _path() -> str:
    return os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
