"""Sees where code reads what differs from one process or call to another: the clock, the rank, random generators.

Python reports each call to a profiler, and to a tracer each line of code that is no library's; that makes a forward
pass several times slower, so they are asked only once there is something to explain.
"""

import datetime
import os
import random as python_random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, final

import numpy as np
import torch

from lockstep.common.own_code import is_installed, location
from lockstep.setup.user_code import is_librarys, place_of_frame

CLOCK: Final = "the clock"
SYSTEM: Final = "the system's randomness"
PROCESS: Final = "the number of the process"
HOST: Final = "the name of the host"
RANK: Final = "the rank or the number of ranks"
PYTHON: Final = "Python's"  # and the next two: random generators
NUMPY: Final = "NumPy's"
TORCH: Final = "torch's"

_VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_RUN: Final = ("rank", "size")  # of a run that was joined
_ASKED: Final = ("get_rank", "get_world_size", "get_node_local_rank")  # of torch.distributed


@contextmanager
def record_reads(counts: Callable[[], int] = lambda: 1) -> Iterator[Mapping[str, str]]:
    """While the block runs, note what is read, and the line that does, in the mapping that is yielded.

    What is read while it `counts` not, which is 0, is left out, but for the rank. So is what has changed of generators
    from one number of `counts` to another: they were seeded in between.
    """
    found: dict[str, str] = {}
    before = sys.getprofile(), sys.gettrace()
    sys.setprofile(_Calls(found, counts).note)
    sys.settrace(_Draws(found, counts).begin)
    try:
        yield found
    finally:
        sys.settrace(before[1])
        sys.setprofile(before[0])


@final
class _Calls:
    """A profiler that notes calls of functions which tell a process or a moment from another."""

    def __init__(self, found: dict[str, str], counts: Callable[[], int]) -> None:
        self._found = found
        self._counts = counts
        clocks = (time.time, time.time_ns, time.monotonic, time.monotonic_ns, time.perf_counter, time.perf_counter_ns)
        dates = (datetime.datetime.now, datetime.datetime.utcnow, datetime.datetime.today, datetime.date.today)
        self._names: dict[Any, str] = {
            **dict.fromkeys((*clocks, *dates, time.localtime, time.gmtime, time.process_time), CLOCK),
            **dict.fromkeys((os.urandom, os.getrandom), SYSTEM),
            os.getpid: PROCESS,
            socket.gethostname: HOST,
        }

    def note(self, frame: FrameType, event: str, called: Any) -> None:
        what, reader = None, frame
        if event == "c_call":
            what = self._names.get(called)
        elif event == "call" and _asks_for_rank(frame):
            what, reader = RANK, frame.f_back or frame
        if what is not None and (what == RANK or self._counts()) and (place := place_of_frame(reader)):
            self._found.setdefault(what, place)


@final
class _Draws:
    """A tracer that notes the lines which advance a generator: NumPy's draws are calls that no profiler sees."""

    def __init__(self, found: dict[str, str], counts: Callable[[], int]) -> None:
        self._found = found
        self._counts = counts
        self._frames: list[tuple[FrameType, int]] = []  # those of no library that run, and the line that each is at
        self._counted = counts()  # at the last look
        self._states: dict[str, Any] = self._now() if self._counted else {}  # the same

    def begin(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if event != "call" or is_librarys(file) or (is_installed(file) and not self._counts()):  # such as an import
            return None
        self._look()
        self._frames.append((frame, frame.f_lineno))
        return self._go_on

    def _go_on(self, frame: FrameType, event: str, _: Any) -> Any:
        if event in ("line", "return"):
            self._look()
            if event == "return":
                self._frames.pop()
            else:
                self._frames[-1] = frame, frame.f_lineno
        return self._go_on

    def _look(self) -> None:
        """Blame what changed since the last look on the line that was begun then; what a library did, on none."""
        before, self._counted = self._counted, self._counts()
        if self._counted != before:
            self._states = {}
        if not self._counted:
            return
        now = self._now()
        for name in [name for name, state in self._states.items() if now[name] != state] if self._frames else []:
            frame, line = self._frames[-1]
            self._found.setdefault(name, location(frame.f_code.co_filename, line))
        self._states = now

    def _now(self) -> dict[str, Any]:
        _, key, position, *_rest = np.random.get_state(legacy=True)
        own = torch.get_rng_state().numpy().tobytes()
        return {PYTHON: python_random.getstate(), NUMPY: (position, np.asarray(key).tobytes()), TORCH: own}


def _asks_for_rank(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_name in _OF_RUN and code.co_filename.endswith("lockstep/loop/run.py"):
        return True
    if code.co_name in _ASKED:
        return code.co_filename.endswith("torch/distributed/distributed_c10d.py")
    return code is type(os.environ).__getitem__.__code__ and frame.f_locals.get("key") in _VARIABLES
