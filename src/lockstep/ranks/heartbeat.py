"""Heartbeats between ranks, so that no rank waits for a lost rank.

A rank that was killed, stopped or disconnected can't report its failure, and a rank that hangs in a collective doesn't
notice that another rank failed. Two background threads on each rank detect both cases.

The first thread does the following twice a second:

1. It writes the heartbeat of its rank to the store, with the status of the rank.

2. It reads the heartbeats of rank 0 and of at most 64 other ranks (its children in a tree), so the cost doesn't grow
with the world size.

3. It reads the first failure. A rank that fails writes the reason to the store.

The second thread ends the process if a watched rank is lost, if the store no longer responds, or if the main thread
doesn't react to a failure. Each rank measures timeouts by counting its own polls of the store. Clocks are never
compared across hosts, so a job can be suspended and resumed as a whole.

A rank can also miss heartbeats because other code is holding the GIL. On the same machine, Lockstep therefore asks the
kernel for the state of a silent process, and keeps waiting while the process is running. If the process no longer
exists, the rank is lost at once.
"""

import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Self, final

from lockstep.common.rank import ranks_in_words
from lockstep.common.text import printable_line
from lockstep.errors import Cause
from lockstep.ranks import oom, process_state
from lockstep.ranks.failure import Failure
from lockstep.ranks.job_store import UntrustedError, fields, whole
from lockstep.ranks.rank_log import log_name
from lockstep.ranks.rendezvous import Rendezvous

_CHILDREN: Final = 64


@dataclass(frozen=True)
class Beat:
    """A heartbeat. After a rank is lost, its last heartbeat is all that the other ranks know about it.

    `look` is the number of polls of the store by the rank. `left` marks the final heartbeat after the rank has
    completed its work.
    """

    look: int
    process: str = ""
    peak: int = 0  # peak memory in bytes
    status: str = ""
    left: bool = False


def parse_beat(value: Any) -> Beat:
    """Return the heartbeat in a JSON value. Raise ValueError if the value isn't a heartbeat."""
    kinds = {"look": int, "process": str, "peak": int, "status": str, "left": bool}
    beat = Beat(**fields(value, kinds))
    whole(beat.look)
    whole(beat.peak)
    return replace(beat, status=printable_line(beat.status))


def watched(rank: int, size: int) -> list[int]:
    """Return the ranks whose heartbeats `rank` reads: its children in the tree and rank 0, which may host the store."""
    first = _CHILDREN * rank + 1
    return [*range(min(rank, 1)), *range(first, min(first + _CHILDREN, size))]


@final
class Heartbeat:
    """A context manager that sends and checks heartbeats. Enter it after the rendezvous.

    It ends this process if another rank failed and the main thread doesn't react, or if a rank is lost. A rank that is
    stopped or on another host is lost if it has sent no heartbeat for `lost_after_s` seconds.
    """

    def __init__(self, rendezvous: Rendezvous, lost_after_s: float) -> None:
        self._rendezvous = rendezvous
        self._beat_s, self._missed = rendezvous.timing.beat_s, rendezvous.timing.missed
        self._lost_looks = max(self._missed, round(lost_after_s / self._beat_s))
        rank, size = rendezvous.info.rank, rendezvous.info.size
        self._watched = watched(rank, size)
        self._beats: dict[int, Beat] = {}  # last received heartbeat by rank
        self._killed = oom.KillDetector(round(rendezvous.timing.memory_s / self._beat_s))
        self._looks = 0  # number of polls of the store
        self._silent = dict.fromkeys(self._watched, 0)  # number of polls since the last new heartbeat, by rank
        self._failed: Failure | None = None
        self._over = threading.Event()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._beat, self._check)]

    def __enter__(self) -> Self:
        for thread in self._threads if self._rendezvous.store else []:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(self._beat_s)  # a thread that waits for a store that no longer exists may never end
        if self._rendezvous.store and kind is None:
            with suppress(RuntimeError):  # raised if rank 0 has already left and closed the store
                self._rendezvous.store.set(_key(self._rendezvous.info.rank), asdict(Beat(self._looks + 1, left=True)))

    def cause(self) -> Failure | None:
        """Return the reason why a collective failed, or None if no reason is found within a few heartbeats."""
        extra_beats = 2 if self._rendezvous.info.rank == 0 else 4  # most ranks learn about a failure from rank 0
        if self._rendezvous.info.size > 1 + _CHILDREN:  # the lost rank may be any rank, not only a watched rank
            peers = [peer for peer in range(self._rendezvous.info.size) if peer != self._rendezvous.info.rank]
            self._silent = {**dict.fromkeys(peers, 0), **self._silent}
            self._watched = peers
        first_poll, deadline = self._looks, time.monotonic() + (self._missed + extra_beats) * self._beat_s
        while self._failed is None and time.monotonic() < deadline:
            time.sleep(self._beat_s / 5)
            if lost := self._lost_ranks(self._missed):
                return self._failure_of(lost)
        if self._failed:
            return replace(self._failed, secondary=True)
        return None if self._looks - first_poll >= self._missed else self._make_store_failure(self._missed)

    def _beat(self) -> None:
        """Send heartbeats, read the heartbeats of watched ranks, and check for failures, until the block ends."""
        assert self._rendezvous.store is not None
        process = process_state.identity()
        with suppress(RuntimeError):  # if the store is gone, the other thread notices that `_looks` no longer grows
            store = self._rendezvous.store.clone()  # a request blocks its connection for all other threads
            while not self._over.is_set():
                beat = Beat(self._looks, process, oom.peak_bytes(), self._rendezvous.status().words)
                store.set(_key(self._rendezvous.info.rank), asdict(beat))
                senders = [rank for rank in self._watched if rank in self._beats or store.has(_key(rank))]
                # Read all heartbeats with a single request. If the main thread is busy, reading the heartbeats of a
                # thousand ranks one by one would take longer than the heartbeat interval.
                beats = dict(zip(senders, store.read_all([_key(rank) for rank in senders], parse_beat), strict=True))
                for rank in self._watched:
                    self._note(rank, beats.get(rank))
                if all(rank in self._beats and self._beats[rank].left for rank in self._watched):
                    self._over.set()  # all watched ranks have completed their work
                if self._failed is None and all(missed < self._missed for missed in self._silent.values()):
                    self._killed.look()
                self._failed = self._failed or self._rendezvous.first_failure(store)
                self._looks += 1
                self._over.wait(self._beat_s)

    def _note(self, rank: int, beat: Beat | UntrustedError | None) -> None:
        """Record a heartbeat or its absence. Only newer heartbeats count, because an old value could be replayed."""
        last = self._beats.get(rank)
        if isinstance(beat, Beat) and (last is None or beat.look > last.look):
            self._beats[rank], self._silent[rank] = beat, 0
        elif last is None or not last.left:
            self._silent[rank] += 1

    def _check(self) -> None:
        """End this process if a rank failed or is lost, or if the store no longer responds."""
        last_polls = stuck_beats = beats_since_failure = 0
        while not self._over.wait(self._beat_s):
            stuck_beats = 0 if self._looks != last_polls else stuck_beats + 1
            last_polls = self._looks
            if self._failed:
                beats_since_failure += 1
                if beats_since_failure >= self._rendezvous.timing.notice_s / self._beat_s:
                    self._rendezvous.end(replace(self._failed, secondary=True))
            elif stuck_beats >= self._lost_looks:
                self._rendezvous.end(self._make_store_failure(stuck_beats))
            elif lost_ranks := self._lost_ranks(self._lost_looks):
                self._rendezvous.end(self._failure_of(lost_ranks))

    def _lost_ranks(self, num_polls: int) -> list[int]:
        """Return the silent ranks whose process is gone, or is in an unknown state after `num_polls` polls."""
        silent = [rank for rank, missed in self._silent.items() if missed >= self._missed]
        states = {rank: process_state.state(self._last_beat(rank).process) for rank in silent}
        overdue = {rank for rank in silent if self._silent[rank] >= num_polls}
        return [rank for rank in silent if states[rank] == "gone" or (states[rank] == "unknown" and rank in overdue)]

    def _last_beat(self, rank: int) -> Beat:
        """Return the last heartbeat of a rank, or an empty heartbeat if there is none."""
        return self._beats.get(rank, Beat(0))

    def _failure_of(self, ranks: list[int]) -> Failure:
        """Return the failure that describes the lost `ranks`."""
        rank = ranks[0]
        last = self._last_beat(rank)
        is_gone = process_state.state(last.process) == "gone"
        on_this_host = self._rendezvous.hosts[rank] == self._rendezvous.rank_log.host
        memory = self._killed.words(last.peak) if on_this_host else oom.describe_peak(last.peak)
        status = f" (last status: {last.status})" if last.status else ""
        explanation = (
            f"{'killed' if is_gone else 'killed, stopped, disconnected or hung'}{f' ({memory})' if memory else ''}"
        )
        observation = f"no heartbeat for {self._silent[rank] * self._beat_s:.0f} s{status}"
        return self._loss_failure(ranks, observation, explanation, "host" if oom.KILLED in memory else "transient")

    def _make_store_failure(self, num_polls: int) -> Failure:
        """Return the failure to report if the store hasn't responded for `num_polls` polls."""
        host = "torchrun's agent" if self._rendezvous.info.hosted else "rank 0, which hosts the rendezvous store,"
        observation = f"{host} has not answered for {num_polls * self._beat_s:.0f} s"
        return self._loss_failure([0], observation, "killed, stopped or disconnected")

    def _loss_failure(
        self, ranks: list[int], observation: str, explanation: str, cause: Cause = "transient"
    ) -> Failure:
        hosts = self._rendezvous.hosts
        other_ranks = f"; also lost: {ranks_in_words(ranks[1:], hosts)}" if ranks[1:] else ""
        text = f"error: {observation}: {explanation}{other_ranks}"
        own_log = self._rendezvous.rank_log.log
        log = str(own_log.with_name(log_name(ranks[0]))) if own_log else ""
        size = self._rendezvous.info.size
        return Failure(ranks[0], size, hosts[ranks[0]], text, log=log, time=time.time(), cause=cause)


def _key(rank: int) -> str:
    return f"beat {rank}"
