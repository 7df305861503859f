"""Reads the stack of another thread of this process.

`faulthandler` writes the stacks in a single C call, during which no other thread runs Python code. Following `f_back`
from the frames of `sys._current_frames` isn't safe while the thread runs: with Python 3.11, it sometimes ends the
process with SIGSEGV (https://github.com/python/cpython/issues/99110, and a pipeline stage of Lockstep).
"""

import faulthandler
import os
import re
import tempfile
from typing import Final, NamedTuple

_THREAD: Final = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+)\b")
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


class StackLine(NamedTuple):
    """A line of a stack. `line` is 0 if it is unknown."""

    file: str
    line: int
    function: str


def read_stack(thread: int) -> list[StackLine]:
    """Return the stack of the thread with the ident `thread`, innermost line first, at most the inner 100 lines.

    Returns an empty list if the thread has ended, or if it is older than 100 other threads.
    """
    return parse_dump(_dump_stacks(), thread)


def parse_dump(dump: str, thread: int) -> list[StackLine]:
    """Return the stack of `thread` from the output of `faulthandler.dump_traceback`."""
    lines: list[StackLine] = []
    is_wanted = False
    for text in dump.splitlines():
        if header := _THREAD.match(text):
            is_wanted = int(header[1], 16) == thread
        elif is_wanted and (frame := _FRAME.match(text)):
            lines.append(StackLine(frame[1], int(frame[2]) if frame[2].isdecimal() else 0, frame[3]))
    return lines


def _dump_stacks() -> str:
    # A file and not a pipe: nothing could read from a full pipe, because this thread holds the interpreter lock.
    create = getattr(os, "memfd_create", None)  # only Linux
    with tempfile.TemporaryFile() if create is None else os.fdopen(create("stacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode("ascii", "replace")
