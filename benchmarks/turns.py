"""Contestants on one device, each in a process of its own, which take turns.

So each has torch's settings and cuBLAS's workspace to itself, none pays for what another one imports or compiles, and
one that is not ready in time is left out and named. They get ready all at once.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from lockstep.common.follow_parent import die_with_parent

Answer = dict[str, Any]
Turn = Callable[[], Answer]
Start = Callable[[], Turn]  # of a module, maybe a partial: it is sent to the process


def take_turns(
    starts: Mapping[str, Start], turns: int, ready_s: float, limit_s: float, method: Literal["fork", "spawn"] = "spawn"
) -> tuple[dict[str, list[Answer]], dict[str, str]]:
    """Let contestants work one after the other, again and again; return the answers of each, and why others have none.

    The first answer is of a turn that all had at once, within `ready_s`: it imports, compiles and warms up. There are
    fewer than `turns` more where the time, `limit_s` in all, is over. To fork saves imports; CUDA does not survive it.
    """
    began = time.monotonic()
    context = multiprocessing.get_context(method)
    answers: dict[str, list[Answer]] = {}
    missing: dict[str, str] = {}
    with ExitStack() as held:
        pipes = {name: _started(context, start, held) for name, start in starts.items()}
        for pipe in pipes.values():
            pipe.send(None)
        for name, pipe in pipes.items():
            _ask(name, pipe, began + ready_s, answers, missing)
        for _ in range(turns):
            for name in list(answers):
                if time.monotonic() - began > limit_s:
                    return _whole_rounds(answers), missing
                pipes[name].send(None)
                _ask(name, pipes[name], began + limit_s, answers, missing)
    return _whole_rounds(answers), missing


def _whole_rounds(answers: dict[str, list[Answer]]) -> dict[str, list[Answer]]:
    """Leave out the last round where not all had their turn in it."""
    fewest = min(map(len, answers.values()), default=0)
    return {name: own[:fewest] for name, own in answers.items()}


def _started(context: Any, start: Start, held: ExitStack) -> Connection:
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(start, theirs), daemon=True)
    process.start()
    theirs.close()
    held.callback(process.join)
    held.callback(process.kill)
    return ours  # type: ignore[no-any-return]


def _ask(name: str, pipe: Connection, until: float, answers: dict[str, list[Answer]], missing: dict[str, str]) -> None:
    """Take a contestant's answer, or leave it out from now on."""
    if not wait([pipe], max(0.0, until - time.monotonic())):
        found: Answer | str = "not ready in time"
    else:
        try:
            found = pipe.recv()
        except EOFError:
            found = "its process ended"
    if isinstance(found, str):
        missing[name] = found
        answers.pop(name, None)
    else:
        answers.setdefault(name, []).append(found)


def _serve(start: Start, pipe: Connection) -> None:
    die_with_parent()
    turn: Turn | None = None
    with suppress(EOFError):
        while True:
            pipe.recv()
            try:
                turn = turn or start()
                pipe.send(turn())
            except Exception:
                pipe.send(traceback.format_exc())
