"""Says which rank the others wait for, and where in its code that one is.

A thread of each rank looks once a second where the main thread is. A rank that has waited for others at one place for
longer than it has patience asks, through the store at which the ranks met; every rank's thread answers with its step,
its place and its stack. Nobody sends anything before somebody asks, and no clocks of two hosts are compared. A rank
that does not answer is stopped or gone.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, final

from lockstep.runtime.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed has it, without a type

_LOOK_S: Final = 1.0
_ANSWER_S: Final = 5.0  # some looks, so that every rank that runs at all has seen the question
_PAUSE_S: Final = 0.05
_LINES: Final = 8  # of a late rank's stack

_OURS: Final = "lockstep/"
_TORCH: Final = "torch/distributed/"
# Where a main thread of ours is that waits for other ranks.
_DOORS: Final = (
    "lockstep/runtime/world.py",
    "lockstep/runtime/canonical.py",
    "lockstep/runtime/lane.py",
    "lockstep/runtime/pipeline.py",
)


@dataclass(frozen=True)
class Place:
    """Where the main thread of a rank is: after how many steps, and its stack, as `file:line function`, innermost last.

    `waits`: for other ranks.
    """

    step: int
    stack: tuple[str, ...]
    waits: bool
    record: str = ""  # where this rank wrote torch's record of its exchanges

    @property
    def words(self) -> str:
        """The step, and the innermost line of ours that tells most: behind the doors all waits look alike."""
        own = [line for line in self.stack if line.startswith(_OURS)]
        telling = [line for line in own if not line.startswith(_DOORS)]
        return f"in step {self.step + 1}, {(telling or own or self.stack)[-1]}"


@final
class StallWatch:
    """Enter to watch the thread that enters; all ranks do, once.

    `step` tells how many steps this rank has done. The rank that asks gives the report to `tell`, on a thread of its
    own, and asks again for as long as nothing moves. `record` writes torch's record of the exchanges of this rank and
    returns where; "" where there is none.
    """

    def __init__(
        self,
        world: World,
        step: Callable[[], int],
        patience_s: float,
        tell: Callable[[str], None],
        record: Callable[[], str] = str,
    ) -> None:
        self._world = world
        self._step = step
        self._patience_s = patience_s
        self._tell = tell
        self._record = record
        self._watched = threading.get_ident()
        self._store = world.part_of_store("stall") if world.size > 1 else None
        self._question = 0  # the first that this rank has not answered
        self._over = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._look_on, self._answer)]

    def __enter__(self) -> StallWatch:
        for thread in self._threads if self._store else []:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_LOOK_S)  # one that talks to a store which is gone may never end

    def _look_on(self) -> None:
        """Look where the main thread is, and ask once it has waited too long."""
        last, answered, since = self._place(), 0, time.monotonic()
        while not self._over.wait(self._pause_s):
            place, now = self._place(), time.monotonic()
            if (place, self._question) != (last, answered):
                last, answered, since = place, self._question, now
            elif place.waits and now - since >= self._patience_s:
                asking = threading.Thread(target=self._ask, args=(now - since,), daemon=True)
                asking.start()
                asking.join(2 * _ANSWER_S)
                if asking.is_alive() and not self._over.is_set():
                    self._tell(_unanswered(self._world.rank, place, now - since))
                since = time.monotonic()

    def _ask(self, seconds: float) -> None:
        """Ask all ranks where they are and tell what they answer, unless another rank has asked."""
        question, store = self._question, self._connected()
        with suppress(RuntimeError):  # the store is gone, and so is who had it: that will be heard of
            if store.add(_asked_key(question), 1) > 1:
                return
            until = time.monotonic() + _ANSWER_S
            found: dict[int, tuple[str, Place]] = {}
            while len(found) < self._world.size and time.monotonic() < until and not self._over.wait(_PAUSE_S):
                for rank in range(self._world.size):
                    if rank not in found and store.check([_answer_key(question, rank)]):
                        found[rank] = _read(store.get(_answer_key(question, rank)))
            if not self._over.is_set():
                self._tell(told(found, self._world.rank, self._world.size, seconds))

    def _answer(self) -> None:
        """Answer each question, with where the main thread is then."""
        store = self._connected()
        with suppress(RuntimeError):
            while not self._over.wait(self._pause_s):
                if store.check([_asked_key(self._question)]):
                    place = self._place()  # first: what comes next takes a while
                    said = json.dumps({"host": self._world.host, **asdict(place), "record": self._record()})
                    store.set(_answer_key(self._question, self._world.rank), said)
                    self._question += 1

    @property
    def _pause_s(self) -> float:
        return min(_LOOK_S, self._patience_s / 4)

    def _connected(self) -> Store:
        """Return a connection of its own for a thread: whoever waits in one keeps the others from it."""
        assert self._store is not None
        return self._store.clone()

    def _place(self) -> Place:
        frame = sys._current_frames().get(self._watched)
        summary = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)  # innermost first
        files = [_short(each.filename) for each in summary]
        ours = next((file for file in files if file.startswith(_OURS)), "")
        stack = tuple(f"{file}:{each.lineno} {each.name}" for file, each in zip(files, summary, strict=True))
        return Place(self._step(), stack[::-1], ours in _DOORS or files[0].startswith(_TORCH))


def told(answers: Mapping[int, tuple[str, Place]], asker: int, size: int, seconds: float) -> str:
    """Return the report: who is late and where, what the others wait in, and who does not answer."""
    late = {rank: answer for rank, answer in sorted(answers.items()) if not answer[1].waits}
    silent = [rank for rank in range(size) if rank not in answers]
    lines = [f"stalled: rank {asker} has waited {seconds:.0f} s for other ranks"]
    lines += [f"  rank {rank} does not answer: it is stopped, its host is gone, or cut off" for rank in silent]
    for rank, (host, place) in late.items():
        lines.append(f"  rank {rank} ({host}) is late: {place.words}")
        lines += [f"      {line}" for line in place.stack[-_LINES:]]
    waiting: dict[str, list[str]] = {}
    for rank, (_, place) in sorted(answers.items()):
        if place.waits:
            waiting.setdefault(place.words, []).append(str(rank))
    lines += [f"  rank {', '.join(ranks)} waits: {where}" for where, ranks in waiting.items()]
    records = [answer[1].record for answer in answers.values() if answer[1].record]
    if records:
        lines.append(f"  torch's record of their exchanges: {', '.join(sorted(records))}")
    if not silent and not late:
        lines.append("  no rank is late: they wait for each other, in different places or over a link that is cut")
    return "\n".join(lines)


def _unanswered(rank: int, place: Place, seconds: float) -> str:
    return (
        f"stalled: rank {rank} has waited {seconds:.0f} s for other ranks: {place.words}\n"
        f"  where the ranks met does not answer: rank 0 or the launcher's agent is stopped, or its host cut off"
    )


def _asked_key(question: int) -> str:
    return f"{question} asked"


def _answer_key(question: int, rank: int) -> str:
    return f"{question} answer {rank}"


def _read(answer: bytes) -> tuple[str, Place]:
    said = json.loads(answer)
    return said["host"], Place(said["step"], tuple(said["stack"]), said["waits"], said["record"])


def _short(filename: str) -> str:
    """Return a file's name from its package on."""
    folders = [folder for folder in sys.path if folder and filename.startswith(f"{folder}/")]
    return filename.removeprefix(f"{max(folders, key=len)}/") if folders else filename
