"""All timeouts and intervals of this package in seconds, with the reason for each."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Timing:
    """Timeouts and intervals in seconds. Tests pass shorter ones.

    tests/ranks/test_timing.py checks the relations between them.
    """

    # Rendezvous: the first and the longest pause between polls of the store. A thousand ranks that poll five times a
    # second are no load for a store. If a few ranks come at the same time, the start loses only milliseconds.
    first_poll_s: float = 0.005
    longest_poll_s: float = 0.2
    # Time until missing ranks are reported. Each further report comes after twice that time. Ranks started by a single
    # command come within a second of each other, or within a few seconds on a busy machine. Rank 0 may open a dataset
    # before the other ranks hear from it.
    name_missing_s: float = 5.0
    name_rank_0_s: float = 10.0
    # How long a new rank 0 may take before ranks trust values of an earlier start: hosts start their ranks seconds
    # apart. Also the time after which a process that listens at the port without answering is an error.
    late_s: float = 30.0
    # Time until an unknown host name is an error. The name of a container may be known only once it runs.
    unknown_host_s: float = 10.0
    # How long the rank that hosts the store waits for ranks that still have to read from it.
    linger_s: float = 5.0

    # Heartbeat interval: short enough to name a killed rank before its user wonders, and no load for a store (two
    # keys).
    beat_s: float = 0.5
    # Age of the last heartbeat from which a rank is silent. A rank that runs doesn't miss four heartbeats, even on a
    # busy machine.
    silent_s: float = 2.0
    # Time until a rank is ended if its main thread doesn't react to a failure of another rank. Normally the main thread
    # polls for the failure, or its own collective breaks, within one heartbeat and one poll.
    notice_s: float = 3.0
    # Only out-of-memory kills in this window explain a lost rank. A killed rank ends once its memory is released, which
    # takes seconds for many GB. Older kills on a shared host belong to other jobs.
    memory_s: float = 10.0

    # The end of a rank of another launcher. An error found before the rendezvous is sent to ranks that come within this
    # time.
    refuse_s: float = 4.0
    # Each step of the end may hang (the host of the store is gone, a terminal is stopped, a disk is full), and so may
    # all of them together.
    report_s: float = 2.0
    leave_s: float = 6.0
    end_s: float = 10.0

    # How often the local launcher reads the memory use of its ranks. The end of a rank wakes it immediately.
    watch_s: float = 0.5
    # How long to wait for the end of the rank that failed first, if a rank ended only because it lost a peer.
    cause_s: float = 2.0
    # Time from SIGTERM to SIGKILL after a rank has failed: enough to write the end of a log, but not a checkpoint.
    stop_s: float = 5.0
    # Timeout for a connection to this machine itself, which takes microseconds.
    loopback_s: float = 2.0

    # How often the stall detector samples the main thread. Reading a stack takes 0.1 ms.
    sample_s: float = 1.0
    # How long to wait for answers. A rank that runs checks for questions as often as it samples.
    answer_s: float = 5.0
    answer_poll_s: float = 0.05

    @property
    def missed(self) -> int:
        """The number of missed heartbeats after which a rank is silent."""
        return round(self.silent_s / self.beat_s)


TIMING: Final = Timing()
