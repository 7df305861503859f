"""A command tied to whoever started it: `python -m lockstep.tether COMMAND [ARGUMENT]...` ends it when stdin ends.

What ssh starts on another host goes on when the ssh is gone; but its stdin ends, however the ssh came to its end, and
so do broken connections. The command has a process group of its own: it is asked to end by SIGTERM, and after a while
all that is left of the group is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from lockstep.parent import die_with_parent

_LOOK_S: Final = 0.1
PATIENCE_S: Final = 60.0  # for a checkpoint to be written after SIGTERM


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


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(tied(sys.argv[1:], sys.stdin.fileno()))
