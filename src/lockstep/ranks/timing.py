"""How long the ranks of a run wait for each other, and for what: all seconds of this package, each with its reason."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Timing:
    """All in seconds. tests/ranks/test_timing.py holds what they must be beside each other; tests pass shorter ones."""

    # Rendezvous: polls of the store, from the first pause to the longest. A thousand ranks that ask five times a second
    # are no load for a store; a start of a few ranks that came together loses milliseconds.
    first_poll_s: float = 0.005
    longest_poll_s: float = 0.2
    # Until those that are missing are named, and then after twice as long each time. Ranks that one command starts are
    # there within a second of each other, or some on a busy machine. Rank 0, once it has come, may open a data set in
    # the meantime.
    name_missing_s: float = 5.0
    name_rank_0_s: float = 10.0
    # What an earlier start left at a store may be believed only after the new rank 0 had this long to come: hosts start
    # their ranks seconds apart. Also for somebody who listens at the port and does not answer.
    late_s: float = 30.0
    # Until a host name that stands for no address is an error: that of a container may be known only once it runs.
    unknown_host_s: float = 10.0
    # Rank 0, who has the store, stays so long for ranks that have still something to read there.
    linger_s: float = 5.0

    # Heartbeat: often enough to name a rank that was killed before its user wonders; no load for a store (two keys).
    beat_s: float = 0.5
    # A rank whose last beat is so old is silent: one that runs at all does not miss four, even on a busy machine.
    silent_s: float = 2.0
    # Until a rank whose main thread takes no notice of a failure elsewhere is ended: the thread polls for it, or its
    # own exchange breaks, within one beat and one poll.
    notice_s: float = 3.0
    # Only out-of-memory kills in this window explain a rank that is lost. A rank that is killed ends once its memory is
    # given back, which takes seconds for many GB; older kills on a shared host were of other jobs.
    memory_s: float = 10.0

    # The end of a rank of another launcher. A mistake found before the rendezvous is sent to ranks that come this soon.
    refuse_s: float = 4.0
    # Each step of an end may hang (the store's host gone, a terminal stopped, a disk full), and so may all of it.
    report_s: float = 2.0
    leave_s: float = 6.0
    end_s: float = 10.0

    # The local launcher looks so often what memory its ranks have; that one has ended wakes it at once.
    watch_s: float = 0.5
    # For the rank that failed first to end as well, where one ended only because it lost another.
    cause_s: float = 2.0
    # From SIGTERM to SIGKILL once a rank has failed: time to write the end of a log, not a checkpoint.
    stop_s: float = 5.0
    # To connect to this machine itself, which takes microseconds.
    loopback_s: float = 2.0

    # The stall detector samples the main thread so often: reading a stack takes 0.1 ms.
    sample_s: float = 1.0
    # For every rank that runs at all to see a question, which it looks for as often as it samples.
    answer_s: float = 5.0
    answer_poll_s: float = 0.05

    @property
    def missed(self) -> int:
        """After how many beats without a new one a rank is silent."""
        return round(self.silent_s / self.beat_s)


TIMING: Final = Timing()
