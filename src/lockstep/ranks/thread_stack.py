"""Reads the stack of another thread of this process.

There are two ways, and each ends the process with SIGSEGV on some versions of Python:

- Following `f_back` from the frames of `sys._current_frames` while the thread runs, with Python 3.11
  (https://github.com/python/cpython/issues/99110, and a pipeline stage of Lockstep).
- `faulthandler.dump_traceback`, a single C call, with Python 3.13 if the thread runs the destructor of an object that a
  returning function held (tests/ranks/test_thread_stack.py).
"""

import faulthandler
import os
import re
import sys
import tempfile
from typing import Final, NamedTuple

_THREAD: Final = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+)\b")
_FOLLOWS_FRAMES: Final = sys.version_info >= (3, 13)
_MAX_LINES: Final = 100
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


class StackLine(NamedTuple):
    """A line of a stack. `line` is 0 if it is unknown."""

    file: str
    line: int
    function: str


def read_stack(thread: int) -> list[StackLine]:
    """Return the stack of the thread with the ident `thread`, innermost line first, at most the inner 100 lines.

    Returns an empty list if the thread has ended. Before Python 3.13, also if it is older than 100 other threads.
    """
    return _follow_frames(thread) if _FOLLOWS_FRAMES else parse_dump(_dump_stacks(), thread)


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


def _follow_frames(thread: int) -> list[StackLine]:
    lines: list[StackLine] = []
    frame = sys._current_frames().get(thread)
    while frame is not None and len(lines) < _MAX_LINES:
        code = frame.f_code
        lines.append(StackLine(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return lines


def _dump_stacks() -> str:
    # A file and not a pipe: nothing could read from a full pipe, because this thread holds the interpreter lock.
    create = getattr(os, "memfd_create", None)  # only Linux
    with tempfile.TemporaryFile() if create is None else os.fdopen(create("stacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode("ascii", "replace")
