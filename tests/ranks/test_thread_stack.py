"""The stack of another thread, as the watch over stalls reads it while that thread runs."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.ranks.thread_stack import StackLine, parse_dump, read_stack

DUMP = """\
Thread 0x00007fd39e1a86c0 (most recent call first):
  File "/a b/threading.py", line 331 in wait
  File "<string>", line ??? in <module>

Thread 0x000000000000beef [named by 3.14] (most recent call first):
  File "/a/train.py", line 7 in <lambda>
  ...
Current thread 0x00007fd39eaa96c0 (most recent call first):
  <no Python frame>
"""


def test_a_dump_is_split_by_its_threads() -> None:
    assert parse_dump(DUMP, 0x7FD39E1A86C0) == [
        StackLine("/a b/threading.py", 331, "wait"),
        StackLine("<string>", 0, "<module>"),
    ]
    assert parse_dump(DUMP, 0xBEEF) == [StackLine("/a/train.py", 7, "<lambda>")]
    assert parse_dump(DUMP, 0x7FD39EAA96C0) == parse_dump(DUMP, 1) == parse_dump("", 1) == []


def test_a_system_without_files_in_memory_takes_a_temporary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert any(line.function.startswith("test_a_system") for line in read_stack(threading.get_ident()))


def test_a_thread_is_read_where_it_stands_and_while_it_runs() -> None:
    ready, end = threading.Event(), threading.Event()

    def stands() -> None:
        ready.set()
        end.wait()

    def runs() -> None:
        def inner(depth: int) -> Any:
            yield from inner(depth - 1) if depth else ()

        ready.set()
        while not end.is_set():
            list(inner(20))

    def read(target: Callable[[], None]) -> set[str]:
        thread = threading.Thread(target=target)
        thread.start()
        assert thread.ident is not None
        assert ready.wait(60)
        found = []
        for _ in range(500):
            found.append(read_stack(thread.ident))
            time.sleep(1e-5)  # let the thread run
        end.set()
        thread.join()
        assert read_stack(thread.ident) == []
        ready.clear()
        end.clear()
        return {line.function for stack in found for line in stack if line.file == __file__}

    assert read(stands) == {"stands"}
    assert read(runs) >= {"runs", "inner"}


def test_a_thread_is_read_while_an_object_is_destroyed_as_its_function_returns() -> None:
    """Here, `faulthandler` of Python 3.13 ends the process with SIGSEGV."""
    ready, end = threading.Event(), threading.Event()

    class Held:
        def __del__(self) -> None:
            ready.set()
            end.wait()

    def holds(_: int) -> None:
        held = Held()  # noqa: F841

    def calls() -> None:
        list(map(holds, [0]))  # from C code, so that a new interpreter loop runs it

    thread = threading.Thread(target=calls)
    thread.start()
    assert thread.ident is not None
    assert ready.wait(60)
    names = [line.function for line in read_stack(thread.ident)]
    end.set()
    thread.join()
    assert names.index("__del__") < names.index("calls")
