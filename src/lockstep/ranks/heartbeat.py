"""Heartbeats between ranks, so that no rank waits forever for a lost rank.

A rank that was killed, stopped or disconnected can't report its failure, and a rank that hangs in a collective doesn't
notice that another rank failed. Two background threads on each rank detect both cases.

The first thread does the following twice a second:

1. It writes the heartbeat of its rank to the store, with the status of the rank.

2. It reads the heartbeats of rank 0 and of at most 64 other ranks (its children in a tree), so the cost doesn't grow
with the world size.

3. It checks the store for the first failure that a rank reported.

The second thread ends the process if a watched rank is lost, if the store no longer responds, or if the main thread
doesn't react to a failure. Each rank measures timeouts by counting its own polls of the store. Clocks are never
compared across hosts, so a job can be suspended and resumed as a whole.

A rank can also miss heartbeats because other code is holding the GIL. On the same machine, Lockstep therefore asks the
kernel for the state of a silent process, and keeps waiting while the process is running. If the process no longer
exists, the rank is declared lost immediately.
"""

import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Self, final

from lockstep.common.rank import format_ranks_with_hosts
from lockstep.common.text import printable_line
from lockstep.errors import Cause
from lockstep.ranks import oom, process_state
from lockstep.ranks.failure import Failure
from lockstep.ranks.job_store import UntrustedError, parse_fields, parse_int
from lockstep.ranks.rank_log import get_log_name
from lockstep.ranks.rendezvous import Rendezvous

_NUM_CHILDREN: Final = 64


@dataclass(frozen=True)
class Beat:
    """A heartbeat of a rank. If the rank is lost, its peers report the `status` from its last heartbeat.

    `look` is the number of times that the rank has polled the store. `process` identifies the process of the rank
    (ranks/process_state.py). `left` marks the final heartbeat of a rank that has completed its work.
    """

    look: int
    process: str = ""
    peak: int = 0  # peak memory in bytes
    status: str = ""
    left: bool = False


def parse_beat(value: Any) -> Beat:
    """Convert a parsed JSON value to a heartbeat. Raises ValueError if the value isn't a valid heartbeat."""
    types = {"look": int, "process": str, "peak": int, "status": str, "left": bool}
    beat = Beat(**parse_fields(value, types))
    parse_int(beat.look)
    parse_int(beat.peak)
    return replace(beat, status=printable_line(beat.status))


def get_watched_ranks(rank: int, size: int) -> list[int]:
    """Return the ranks whose heartbeats `rank` reads: its children in the tree and rank 0, which may host the store."""
    first = _NUM_CHILDREN * rank + 1
    return [*range(min(rank, 1)), *range(first, min(first + _NUM_CHILDREN, size))]


@final
class Heartbeat:
    """A context manager that sends heartbeats and checks those of other ranks. Enter it after the rendezvous.

    Ends this process if a rank is lost, or if a rank failed and the main thread of this process doesn't react. A rank
    that is stopped or on a different host is declared lost if it has sent no heartbeat for `lost_after_s` seconds.
    """

    def __init__(self, rendezvous: Rendezvous, lost_after_s: float) -> None:
        self._rendezvous = rendezvous
        self._beat_s, self._polls_until_silent = rendezvous.timing.beat_s, rendezvous.timing.max_missed_beats
        self._polls_until_lost = max(self._polls_until_silent, round(lost_after_s / self._beat_s))
        rank, size = rendezvous.info.rank, rendezvous.info.size
        self._watched_ranks = get_watched_ranks(rank, size)
        self._beats: dict[int, Beat] = {}  # the last heartbeat of each rank
        self._kill_detector = oom.KillDetector(round(rendezvous.timing.oom_window_s / self._beat_s))
        self._poll_count = 0
        self._polls_since_beat = dict.fromkeys(self._watched_ranks, 0)  # since the last heartbeat of each rank
        self._failed: Failure | None = None
        self._stop_event = threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._heartbeat_loop, self._watch_loop)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads if self._rendezvous.store else []:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop_event.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(self._beat_s)  # times out if the store is gone, because the thread waits for it forever
        if self._rendezvous.store and kind is None:
            with suppress(RuntimeError):  # raised if rank 0 has already left and closed the store
                self._rendezvous.store.set(
                    _get_beat_key(self._rendezvous.info.rank), asdict(Beat(self._poll_count + 1, left=True))
                )

    def find_cause(self) -> Failure | None:
        """Return the failure that caused a collective to fail, or None if none is found within a few heartbeats."""
        extra_beats = 2 if self._rendezvous.info.rank == 0 else 4  # other ranks usually learn of a failure from rank 0
        if self._rendezvous.info.size > 1 + _NUM_CHILDREN:  # the lost rank may be one that this rank doesn't watch
            peers = [peer for peer in range(self._rendezvous.info.size) if peer != self._rendezvous.info.rank]
            self._polls_since_beat = {**dict.fromkeys(peers, 0), **self._polls_since_beat}
            self._watched_ranks = peers
        first_poll, deadline = (
            self._poll_count,
            time.monotonic() + (self._polls_until_silent + extra_beats) * self._beat_s,
        )
        while self._failed is None and time.monotonic() < deadline:
            time.sleep(self._beat_s / 5)
            if lost := self._find_lost_ranks(self._polls_until_silent):
                return self._make_loss_failure(lost)
        if self._failed:
            return replace(self._failed, secondary=True)
        return (
            None
            if self._poll_count - first_poll >= self._polls_until_silent
            else self._make_store_failure(self._polls_until_silent)
        )

    def _heartbeat_loop(self) -> None:
        """Send and read heartbeats, and check for failures. Runs until the `with` block exits."""
        assert self._rendezvous.store is not None
        process = process_state.get_identity()
        with suppress(
            RuntimeError
        ):  # if the store is gone, the other thread notices that `_poll_count` no longer grows
            store = self._rendezvous.store.clone()  # a request blocks its connection for all other threads
            while not self._stop_event.is_set():
                beat = Beat(self._poll_count, process, oom.get_peak_bytes(), self._rendezvous.get_status().description)
                store.set(_get_beat_key(self._rendezvous.info.rank), asdict(beat))
                senders = [
                    rank for rank in self._watched_ranks if rank in self._beats or store.has(_get_beat_key(rank))
                ]
                # Read all heartbeats with a single request. If the main thread is busy, reading the heartbeats of a
                # thousand ranks one by one would take longer than the heartbeat interval.
                beats = dict(
                    zip(senders, store.read_all([_get_beat_key(rank) for rank in senders], parse_beat), strict=True)
                )
                for rank in self._watched_ranks:
                    self._record_beat(rank, beats.get(rank))
                if all(rank in self._beats and self._beats[rank].left for rank in self._watched_ranks):
                    self._stop_event.set()  # there is no running rank left to watch
                if self._failed is None and all(
                    missed < self._polls_until_silent for missed in self._polls_since_beat.values()
                ):
                    self._kill_detector.record_healthy()
                self._failed = self._failed or self._rendezvous.get_first_failure(store)
                self._poll_count += 1
                self._stop_event.wait(self._beat_s)

    def _record_beat(self, rank: int, beat: Beat | UntrustedError | None) -> None:
        """Record a heartbeat or its absence. Out-of-order heartbeats are ignored, so that they can't be replayed."""
        last = self._beats.get(rank)
        if isinstance(beat, Beat) and (last is None or beat.look > last.look):
            self._beats[rank], self._polls_since_beat[rank] = beat, 0
        elif last is None or not last.left:
            self._polls_since_beat[rank] += 1

    def _watch_loop(self) -> None:
        """End this process if a rank failed or is lost, or if the store no longer responds."""
        last_polls = stuck_beats = beats_since_failure = 0
        while not self._stop_event.wait(self._beat_s):
            stuck_beats = 0 if self._poll_count != last_polls else stuck_beats + 1
            last_polls = self._poll_count
            if self._failed:
                beats_since_failure += 1
                if beats_since_failure >= self._rendezvous.timing.notice_timeout_s / self._beat_s:
                    self._rendezvous.end(replace(self._failed, secondary=True))
            elif stuck_beats >= self._polls_until_lost:
                self._rendezvous.end(self._make_store_failure(stuck_beats))
            elif lost_ranks := self._find_lost_ranks(self._polls_until_lost):
                self._rendezvous.end(self._make_loss_failure(lost_ranks))

    def _find_lost_ranks(self, num_polls: int) -> list[int]:
        """Return the silent ranks that are lost.

        A silent rank is lost if its process no longer exists, or if its process is in an unknown state and hasn't sent
        a heartbeat for `num_polls` polls.
        """
        silent = [rank for rank, missed in self._polls_since_beat.items() if missed >= self._polls_until_silent]
        states = {rank: process_state.get_state(self._get_last_beat(rank).process) for rank in silent}
        overdue = {rank for rank in silent if self._polls_since_beat[rank] >= num_polls}
        return [rank for rank in silent if states[rank] == "gone" or (states[rank] == "unknown" and rank in overdue)]

    def _get_last_beat(self, rank: int) -> Beat:
        """Return the last heartbeat of a rank, or an empty heartbeat if there is none."""
        return self._beats.get(rank, Beat(0))

    def _make_loss_failure(self, ranks: list[int]) -> Failure:
        """Return the failure to report if `ranks` are lost."""
        rank = ranks[0]
        last = self._get_last_beat(rank)
        is_gone = process_state.get_state(last.process) == "gone"
        on_this_host = self._rendezvous.hosts[rank] == self._rendezvous.rank_log.host
        memory = self._kill_detector.describe_memory(last.peak) if on_this_host else oom.describe_peak(last.peak)
        status = f" (last status: {last.status})" if last.status else ""
        explanation = (
            f"{'killed' if is_gone else 'killed, stopped, disconnected or hung'}{f' ({memory})' if memory else ''}"
        )
        observation = f"no heartbeat for {self._polls_since_beat[rank] * self._beat_s:.0f} s{status}"
        return self._make_failure(
            ranks, observation, explanation, "host" if oom.KILL_DESCRIPTION in memory else "transient"
        )

    def _make_store_failure(self, num_polls: int) -> Failure:
        """Return the failure to report if the store hasn't responded for `num_polls` polls."""
        host = "torchrun's agent" if self._rendezvous.info.hosted else "rank 0, which hosts the rendezvous store,"
        observation = f"{host} has not answered for {num_polls * self._beat_s:.0f} s"
        return self._make_failure([0], observation, "killed, stopped or disconnected")

    def _make_failure(
        self, lost_ranks: list[int], observation: str, explanation: str, cause: Cause = "transient"
    ) -> Failure:
        hosts = self._rendezvous.hosts
        other_ranks = f"; also lost: {format_ranks_with_hosts(lost_ranks[1:], hosts)}" if lost_ranks[1:] else ""
        text = f"error: {observation}: {explanation}{other_ranks}"
        own_log = self._rendezvous.rank_log.log_path
        log = str(own_log.with_name(get_log_name(lost_ranks[0]))) if own_log else ""
        size = self._rendezvous.info.size
        return Failure(lost_ranks[0], size, hosts[lost_ranks[0]], text, log=log, time=time.time(), cause=cause)


def _get_beat_key(rank: int) -> str:
    return f"beat {rank}"
