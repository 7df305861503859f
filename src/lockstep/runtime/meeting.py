"""Where the ranks of a start come together, before any process group: who is here, and have all of them the same?

They meet at a store of torch.distributed: rank 0 listens, or torchrun's agent does, or they share a file. Such a store
may hold what an earlier start left there, whose ranks are gone. So rank 0 draws a name for this start, the others ask
for it, and all that is said lies under that name. Who finds itself already there has read an old name and waits for
another; and nothing begins before rank 0 has seen all ranks under its name and says so.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import torch.distributed as dist

from lockstep.core.rank import RankInfo, meeting_place, ranks_in_words
from lockstep.errors import TrainingError, UsageError
from lockstep.runtime import ports
from lockstep.runtime.doing import Doing
from lockstep.runtime.failure import Failure, PeerFailedError, RanksDifferError, from_json
from lockstep.runtime.peers import PeerLostError
from lockstep.runtime.voice import Voice

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed has it, without a type

_START: Final = "lockstep start"
_BEGIN: Final = "begin"
_FAILURES: Final = "failures"
_LEFT: Final = "left"
_SAY_S: Final = 1.5  # of waiting, before who is missing is named; then ever less often
_SLOW_S: Final = 10.0  # the same for rank 0, once it is here
_SHORTEST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.2
_LINGER_S: Final = 5.0
_LATE_S: Final = 30.0  # that rank 0 of a new start may come after others of it
_VALUE_LENGTH: Final = 60  # of what is shown of a fact
_SHOWN: Final = 5  # differences
_ANOTHER_RUN: Final = "if another run meets there, choose another port"


@final
class Meeting:
    """The ranks of a start, from `join` to `leave`.

    `store` is None for one that is alone, `hosts` are by rank. `end` is how a process of this kind ends at once.
    `doing` tells, on any thread, what this rank does; whoever works with the ranks that have met replaces it.
    """

    def __init__(self, info: RankInfo, timeout_s: float, end: Callable[[Meeting, Failure], NoReturn]) -> None:
        self.info = info
        self.voice = voice = Voice(info)
        self._end = end
        self._ending = threading.Lock()
        self.timeout_s = timeout_s
        self.store: Store | None = None
        self.hosts: tuple[str, ...] = (voice.host,)
        self.doing: Callable[[], Doing] = Doing
        self.serves = False  # this process is where the others ask
        self._exchanges = 0

    def compare(self, facts: Mapping[str, Any]) -> None:
        """Raise RanksDifferError on all ranks where `facts`, ready for JSON, are not those of rank 0. All call it."""
        if self.store is None:
            return
        key = self._exchange("compare")
        with self._asking():
            self.store.set(f"{key} {self.info.rank}", json.dumps(facts, sort_keys=True))
            if self.store.add(f"{key} count", 1) == self.info.size:
                self.store.set(f"{key} all", "")
            if self.info.rank == 0:  # for all: else each would read what each has said
                self._wait(f"{key} all", key)
                said = self.store.multi_get([f"{key} {rank}" for rank in range(self.info.size)])
                unlike = {rank: json.loads(each) for rank, each in enumerate(said) if rank == 0 or each != said[0]}
                self.store.set(f"{key} verdict", "\n".join(differences(unlike, self.hosts)))
            self._wait(f"{key} verdict", key)
            verdict = self.store.get(f"{key} verdict").decode()
        if verdict:
            raise RanksDifferError(verdict)

    def tell(self, text: str = "") -> str:
        """Return rank 0's `text` on every rank. All call it."""
        if self.store is None:
            return text
        key = self._exchange("tell")
        with self._asking():
            if self.info.rank == 0:
                self.store.set(f"{key} 0", text)
            self._wait(f"{key} 0", key)
            return self.store.get(f"{key} 0").decode()

    def failed(self, store: Store | None = None) -> Failure | None:
        """Return the first failure of a rank that had a cause of its own, if there is one.

        `store` is another connection to the same store, for another thread.
        """
        store = store or self.store
        if store is None or not store.check([f"{_FAILURES} 1"]):
            return None
        return from_json(store.get(f"{_FAILURES} 1"))

    def fail(self, failure: Failure) -> Failure | None:
        """Let the others know of a failure that ends this rank, and return the first of all failures.

        None: there is no store to tell them by, or it is gone, and so is who had it.
        """
        if self.store is None:
            return None
        with suppress(RuntimeError):
            if not failure.secondary:
                self.store.set(f"{_FAILURES} {self.store.add(_FAILURES, 1)}", failure.to_json())
            return self.failed() or failure
        return None

    def end(self, failure: Failure) -> NoReturn:
        """End this process for a failure, its own or another rank's, from whatever thread; who comes second waits."""
        self._ending.acquire()
        self._end(self, failure)

    def leave(self) -> None:
        """Say that this rank asks no more. Where the others ask, it stays a while for those that still do."""
        if self.store is None:
            return
        until = time.monotonic() + _LINGER_S
        with suppress(RuntimeError):  # rank 0 has not stayed
            left = self.store.add(_LEFT, 1)
            while self.serves and left < self.info.size and time.monotonic() < until:
                time.sleep(_SHORTEST_PAUSE_S)
                left = self.store.add(_LEFT, 0)

    def join(self, rendezvous: str) -> None:
        """Find the others at `rendezvous` (env://, tcp://HOST:PORT, file:///PATH). All call it, before anything else.

        Ranks that do not come are named, as they are at all exchanges. A taken port raises UsageError.
        """
        if self.info.size == 1:
            return
        address = meeting_place(self.info, rendezvous)
        there = self.info.hosted and rendezvous == "env://"
        own = not there and address.startswith("tcp://")  # rank 0's, and so a new one at each start
        self.serves = self.info.rank == 0 and own
        with self._asking():
            base = _store(self, address)
            if self.info.rank == 0:
                self._gather(base)
            else:
                self._follow(base, 0.0 if own else min(_LATE_S, self.timeout_s))

    def _gather(self, base: Store) -> None:
        name = uuid.uuid4().hex
        self.store = dist.PrefixStore(name, base)  # type: ignore[attr-defined]
        here = {0: self._self()}
        self.store.set("here 0", json.dumps(here[0]))
        base.set(_START, name)
        for _ in self._looks(lambda: self._missing("here"), _SAY_S):
            for rank in set(range(1, self.info.size)) - here.keys():
                if self.store.check([f"here {rank}"]):
                    here[rank] = json.loads(self.store.get(f"here {rank}"))
                    self._check_size(rank, here[rank], "0")
            if len(here) == self.info.size:
                break
        self.hosts = tuple(here[rank]["host"] for rank in range(self.info.size))
        self.store.set(_BEGIN, json.dumps({"size": self.info.size, "host": self.hosts[0], "hosts": self.hosts}))

    def _follow(self, base: Store, late_s: float) -> None:
        """Find the part of the store that is this start's, where rank 0 may come so long after this one."""
        old: set[str] = set()
        name, doubted_until, over = "", 0.0, False
        for _ in self._looks(lambda: self._missing("here") if self.store else [0], _SAY_S):
            if base.check([_START]) and (found := base.get(_START).decode()) not in {name, *old}:
                part = dist.PrefixStore(found, base)  # type: ignore[attr-defined]
                over = part.check([_BEGIN]) or self.failed(part) is not None  # without this rank
                if part.add(f"came {self.info.rank}", 1) > 1:
                    if not late_s:
                        raise UsageError(f"where the ranks meet another process has come as this rank; {_ANOTHER_RUN}")
                    old.add(found)
                    continue
                name, self.store = found, part
                doubted_until = time.monotonic() + late_s if over else 0.0
                self.store.set(f"here {self.info.rank}", json.dumps(self._self()))
            if self.store is None or time.monotonic() < doubted_until:
                continue
            if self._come(_BEGIN):
                begun = json.loads(self.store.get(_BEGIN))
                if over:
                    self.store = None  # a run that goes on without this rank has nothing to hear of it
                self._check_size(0, begun, str(self.info.rank))
                self.hosts = tuple(begun["hosts"])
                return

    def _self(self) -> dict[str, Any]:
        return {"size": self.info.size, "host": self.voice.host}

    def _check_size(self, other: int, said: Mapping[str, Any], mine: str) -> None:
        if said["size"] != self.info.size:
            raise UsageError(
                f"WORLD_SIZE: rank {other} ({said['host']}) was started as one of {said['size']} ranks, rank {mine} "
                f"({self.voice.host}) as one of {self.info.size}; start all ranks with the same; {_ANOTHER_RUN}"
            )

    def _exchange(self, what: str) -> str:
        self._exchanges += 1
        return f"{what} {self._exchanges}"

    def _wait(self, key: str, who: str) -> None:
        """Wait for `key`, which is there once `who RANK` is of every rank that has to say something."""
        assert self.store is not None
        for _ in self._looks(lambda: self._missing(who), _SLOW_S):
            if self._come(key):
                return

    def _come(self, key: str) -> bool:
        """Return whether `key` is there; raise PeerFailedError if another rank failed without it."""
        assert self.store is not None
        failure = self.failed()  # looked for first: who says `key` and then fails has said it
        come: bool = self.store.check([key])
        if failure is not None and not come:
            raise PeerFailedError(failure)
        return come

    def _missing(self, who: str) -> list[int]:
        assert self.store is not None
        missing = [rank for rank in range(self.info.size) if not self.store.check([f"{who} {rank}"])]
        return [rank for rank in missing if rank != self.info.rank] or [0]

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Give a name to what torch raises where the store is gone."""
        try:
            yield
        except RuntimeError as error:
            first, *_ = *str(error).splitlines(), type(error).__name__
            raise PeerLostError(f"lost {_listener(self.info)}, where the ranks meet ({first})") from error

    def _looks(self, missing: Callable[[], list[int]], say_of_rank_0_s: float) -> Iterator[None]:
        """Yield for look after look; say now and then who is missing, and raise TrainingError at the timeout.

        Rank 0 says it, and of rank 0 one rank of each host.
        """

        def words() -> str:
            return ranks_in_words(missing(), self.hosts)

        def say(text: str) -> None:
            if 0 in missing():
                self.voice.say(text)

        if self.info.rank == 0:
            return looks(self.timeout_s, words, self.voice.say)
        # rank 0 has the last word
        return looks(self.timeout_s + _LINGER_S, words, say if _speaks(self.info) else None, say_of_rank_0_s)


def looks(
    timeout_s: float, missing: Callable[[], str], say: Callable[[str], None] | None, say_at: float = _SAY_S
) -> Iterator[None]:
    """Yield for look after look, ever less often; say now and then who is missing; raise TrainingError at the end."""
    began, pause = time.monotonic(), _SHORTEST_PAUSE_S
    while (waited := time.monotonic() - began) < timeout_s:
        yield
        if say and waited >= say_at:
            say(f"has waited {waited:.0f} s for {missing()}")
            say_at *= 2
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE_S)
    raise TrainingError(f"waited {timeout_s:.0f} s for {missing()}, in vain")


def differences(facts: Mapping[int, Mapping[str, Any]], hosts: Sequence[str]) -> list[str]:
    """Return a line for each fact of rank 0 that other ranks have otherwise: the ranks, and the values of the first."""
    lines = []
    for name in facts[0]:
        others = [rank for rank in facts if facts[rank].get(name) != facts[0][name]]
        if others:
            what = "; ".join(_unlike(facts[0][name], facts[others[0]].get(name)))
            verb = "differs" if len(others) == 1 else "differ"
            who = ranks_in_words(others, hosts)
            lines.append(f"{name}: {who} {verb} from rank 0 ({hosts[0]}): {what}; start all ranks with the same")
    return lines


def _unlike(first: Any, other: Any, name: str = "") -> list[str]:
    """Return where two values differ, part by part, as `name: other's, not first's`."""
    if not (isinstance(first, dict) and isinstance(other, dict)):
        return [f"{f'{name}: ' if name else ''}{_short(other)}, not {_short(first)}"]
    found = []
    for key in sorted({*first, *other}):
        if first.get(key) != other.get(key):
            found += _unlike(first.get(key), other.get(key), f"{name}.{key}" if name else str(key))
    return found if len(found) <= _SHOWN else [*found[:_SHOWN], f"{len(found) - _SHOWN} more"]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _VALUE_LENGTH else f"{text[: _VALUE_LENGTH - 3]}..."


def _store(meeting: Meeting, address: str) -> Store:
    """Return a connection to the store; rank 0 opens it, unless somebody else does."""
    info, timeout = meeting.info, timedelta(seconds=meeting.timeout_s)
    if address.startswith("file://"):
        path = Path(address.removeprefix("file://"))
        try:
            path.open("ab").close()
        except OSError as error:  # torch would try for minutes
            raise UsageError(f"rendezvous {address}: {error.strerror}; name a file that all ranks can write") from error
        return dist.FileStore(str(path), info.size)  # type: ignore[attr-defined]
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host, number = host.strip("[]"), int(port)

    def opened() -> Store:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, number, None, meeting.serves, timeout, wait_for_workers=False, multi_tenant=True
        )

    if not meeting.serves:
        return _connected(meeting, host, number, opened)
    ports.check(host, number)
    return opened()


def _connected(meeting: Meeting, host: str, port: int, opened: Callable[[], Store]) -> Store:
    """Return the connection that `opened` returns once somebody listens and answers.

    torch waits too, without a word; and for ever for who listens and does not answer.
    """
    info, reason = meeting.info, ""
    answers: SimpleQueue[Store | RuntimeError] = SimpleQueue()

    def connect() -> None:
        try:
            answers.put(opened())
        except RuntimeError as error:
            answers.put(error)

    def missing() -> str:
        return f"{_listener(info)} at {host}:{port} ({reason})"

    connecting = threading.Thread(target=connect, daemon=True)
    gives_up = inf
    for _ in looks(meeting.timeout_s, missing, meeting.voice.say if _speaks(info) else None):
        if time.monotonic() > gives_up:
            raise UsageError(f"waited {_LATE_S:.0f} s for {missing()}; {_ANOTHER_RUN}")
        if not connecting.ident:
            try:
                socket.create_connection((host, port), timeout=_SAY_S).close()
            except OSError as error:
                reason = error.strerror or str(error)
                continue
            reason = "somebody listens there, but does not answer"
            connecting.start()
            gives_up = time.monotonic() + _LATE_S
        with suppress(Empty):
            answer = answers.get(timeout=_SAY_S)
            if isinstance(answer, RuntimeError):
                raise answer
            return answer
    raise AssertionError  # looks raises


def _speaks(info: RankInfo) -> bool:
    """Return whether this rank speaks of rank 0: one does on each host, or each that may have a terminal of its own."""
    beside_rank_0 = info.local_rank == info.rank
    return info.local_rank == int(beside_rank_0) or info.launcher == "environment"


def _listener(info: RankInfo) -> str:
    return "the agent of torchrun" if info.hosted else "rank 0"
