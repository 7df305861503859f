"""All timeouts and intervals of this package, in seconds, with the reason for each."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Timing:
    """Timeouts and intervals in seconds. Tests use shorter values.

    tests/ranks/test_timing.py checks the relations between the values.
    """

    # The first and the longest pause between polls of the store during the rendezvous. Even a thousand ranks that poll
    # five times a second are a negligible load. If the ranks start at the same time, the first pauses are so short that
    # polling delays them by only milliseconds.
    first_poll_s: float = 0.005
    longest_poll_s: float = 0.2
    # Time until missing ranks are first reported. The waiting time doubles with each report. Ranks started by a single
    # command arrive within a second, or within a few seconds on a busy machine. Other ranks wait longer before they
    # report that rank 0 is missing, because it may open a dataset before it writes to the store.
    report_missing_s: float = 5.0
    report_missing_rank_0_s: float = 10.0
    # Maximum delay of rank 0 when a run restarts. Until then, ranks assume that the values in the store may be from an
    # earlier start of the run. Hosts start their ranks seconds apart. This is also the timeout for a process that
    # listens on the port without responding.
    late_timeout_s: float = 30.0
    # Time until an unknown host name is an error. The host name of a container may be unknown until the container runs.
    unknown_host_timeout_s: float = 10.0
    # How long the rank that hosts the store waits at the end for ranks that still have to read from the store.
    linger_s: float = 5.0

    # Heartbeat interval. It is short enough to report a killed rank quickly, and the load on the store is negligible.
    beat_s: float = 0.5
    # Time without a heartbeat after which a rank counts as silent. Even on a busy machine, a running rank doesn't miss
    # four heartbeats in a row.
    silent_s: float = 2.0
    # Time until a rank is terminated if its main thread doesn't react to a failure of another rank. Normally, the main
    # thread polls for the failure, or its own collective fails, within one heartbeat and one poll.
    notice_timeout_s: float = 3.0
    # Time window in which an out-of-memory kill can explain the loss of a rank. A killed rank only ends once its memory
    # is released, which takes seconds for many GB. On a shared host, older kills may belong to other jobs.
    oom_window_s: float = 10.0

    # How long a rank that finds an error before the rendezvous waits for the other ranks, to report the error to them.
    # Only applies to external launchers.
    early_failure_wait_s: float = 4.0
    # Timeouts for the exit of a rank that an external launcher started: for reporting its failure, for leaving the
    # job, and for both together. Either step may hang, for example if the process that hosts the store is gone or a
    # terminal is stopped.
    report_timeout_s: float = 2.0
    leave_timeout_s: float = 6.0
    end_timeout_s: float = 10.0

    # Interval at which the local launcher reads the memory use of its ranks. If a rank ends, the launcher wakes up
    # immediately.
    watch_s: float = 0.5
    # How long the local launcher waits for the rank that failed first, if another rank ended because it lost a peer.
    first_failure_wait_s: float = 2.0
    # Time from SIGTERM to SIGKILL after a rank has failed. It is enough to finish writing a log, but not a checkpoint.
    sigkill_delay_s: float = 5.0
    # Timeout for connecting to the loopback interface, which normally takes microseconds.
    loopback_timeout_s: float = 2.0

    # Interval at which the stall detector samples the stack of the main thread, which takes 0.1 ms.
    sample_s: float = 1.0
    # Timeout for the answers to a stall query. A running rank checks for queries once per `sample_s`.
    answer_timeout_s: float = 5.0
    answer_poll_s: float = 0.05

    @property
    def max_missed_beats(self) -> int:
        """The number of missed heartbeats after which a rank counts as silent."""
        return round(self.silent_s / self.beat_s)


TIMING: Final = Timing()
