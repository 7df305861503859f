"""All timeouts and intervals of this package, in seconds, with the reason for each."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Timing:
    """Timeouts and intervals in seconds. Tests use shorter values.

    tests/ranks/test_timing.py checks the relations between the values.
    """

    # The first and the longest pause between polls of the store during the rendezvous. A thousand ranks that poll five
    # times a second are a negligible load. If a few ranks start at the same time, polling delays them by only
    # milliseconds.
    first_poll_s: float = 0.005
    longest_poll_s: float = 0.2
    # Time until missing ranks are reported. The time until each later report is twice as long. Ranks started by a
    # single command arrive within a second, or within a few seconds on a busy machine. Rank 0 may open a dataset before
    # the other ranks hear from it.
    name_missing_s: float = 5.0
    name_rank_0_s: float = 10.0
    # Maximum delay of a new rank 0. After this delay, ranks trust the values in the store, which an earlier start of
    # the run may have written. Hosts start their ranks seconds apart. This is also the time after which a process that
    # listens on the port without responding is an error.
    late_s: float = 30.0
    # Time until an unknown host name is an error. The name of a container may be unknown until the container runs.
    unknown_host_s: float = 10.0
    # Time for which the rank that hosts the store waits for other ranks that still have to read from the store.
    linger_s: float = 5.0

    # Heartbeat interval. It is short enough to report a killed rank quickly, and a negligible load for the store (two
    # keys).
    beat_s: float = 0.5
    # Age of the last heartbeat after which a rank is silent. A running rank doesn't miss four heartbeats, even on a
    # busy machine.
    silent_s: float = 2.0
    # Time until a rank is terminated if its main thread doesn't react to a failure of another rank. Normally, the main
    # thread polls for the failure, or its own collective fails, within one heartbeat and one poll.
    notice_s: float = 3.0
    # Time window in which an out-of-memory kill can explain a lost rank. A killed rank only ends once its memory is
    # released, which takes seconds for many GB. Older kills on a shared host belong to other jobs.
    memory_s: float = 10.0

    # If a rank of an external launcher finds an error before the rendezvous, it waits this long for the other ranks, so
    # that it can report the error to them.
    refuse_s: float = 4.0
    # Timeouts for reporting a failure, for leaving the job, and for both together, if a rank of an external launcher
    # ends. Each step may hang, for example if the host of the store is gone, or if a terminal is stopped.
    report_s: float = 2.0
    leave_s: float = 6.0
    end_s: float = 10.0

    # Interval at which the local launcher reads the memory use of its ranks. If a rank ends, the launcher wakes up
    # immediately.
    watch_s: float = 0.5
    # Time to wait for the rank that failed first, if a rank only ended because it lost a peer.
    cause_s: float = 2.0
    # Time from SIGTERM to SIGKILL after a rank has failed. It is enough to finish writing a log, but not a checkpoint.
    stop_s: float = 5.0
    # Timeout for connecting to this machine itself, which takes microseconds.
    loopback_s: float = 2.0

    # Interval at which the stall detector samples the main thread. Reading a stack takes 0.1 ms.
    sample_s: float = 1.0
    # Time to wait for answers to a stall query. A running rank checks for queries once per sample.
    answer_s: float = 5.0
    answer_poll_s: float = 0.05

    @property
    def missed(self) -> int:
        """The number of missed heartbeats after which a rank counts as silent."""
        return round(self.silent_s / self.beat_s)


TIMING: Final = Timing()
