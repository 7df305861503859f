"""A rank that another launcher started: it reports its end at the store, and on the terminal if no other rank does."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NoReturn

from lockstep.comm.peer_errors import lost_peer
from lockstep.common.rank import ALONE, RankInfo
from lockstep.errors import LockstepError
from lockstep.ranks.failure import Failure, failure_of
from lockstep.ranks.heartbeat import Heartbeat
from lockstep.ranks.member import at_most, end_process, member
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.secret import job_secret
from lockstep.ranks.timing import TIMING, Timing


@contextmanager
def membership(
    info: RankInfo, address: str, timeout_s: float, lost_after_s: float, timing: Timing = TIMING
) -> Iterator[Rendezvous]:
    """Meet the other ranks and be one of them while the block runs.

    An error ends this process here and now, whatever its other threads do, with what there is to say on the terminal.
    """
    rendezvous = Rendezvous(info, timeout_s, _end, job_secret(os.environ), timing)
    heartbeat = Heartbeat(rendezvous, lost_after_s)
    with member(rendezvous, address):
        with heartbeat:
            try:
                yield rendezvous
            except Exception as error:
                if lost_peer(error) is None:
                    raise
                # Where nobody knows of a cause, as when a link between two other hosts is cut, this is all there is.
                unexplained = replace(failure_of(error, rendezvous.info, rendezvous.rank_log), secondary=False)
                rendezvous.end(heartbeat.cause() or unexplained)
        rendezvous.leave()


def refuse(info: RankInfo, address: str, error: LockstepError) -> NoReturn:
    """End this rank for an error found before it joined the others, and report it to them if they join soon.

    Where all ranks found the same mistake it is said once.
    """
    rendezvous = Rendezvous(info, TIMING.refuse_s, _end)
    try:
        rendezvous.secret = job_secret(os.environ)
        rendezvous.join(address)
    except (LockstepError, RuntimeError):
        rendezvous.store = None  # nobody to tell
    rendezvous.end(failure_of(error, rendezvous.info, rendezvous.rank_log))


def alone() -> Rendezvous:
    """Return the rendezvous of the only process of a run."""
    return Rendezvous(ALONE, 0.0, _end)


def join_ranks(info: RankInfo, address: str, timeout_s: float, timing: Timing = TIMING) -> Rendezvous:
    """Return the rendezvous of this rank with the others, which it has joined."""
    rendezvous = Rendezvous(info, timeout_s, _end, job_secret(os.environ), timing)
    rendezvous.join(address)
    return rendezvous


def _end(rendezvous: Rendezvous, failure: Failure) -> NoReturn:
    end_process(rendezvous, failure, _report)


def _report(rendezvous: Rendezvous, failure: Failure) -> None:
    """Send the other ranks why this one ends, and print what no other rank prints."""
    timing = rendezvous.timing
    first = at_most(timing.report_s, lambda: rendezvous.fail(failure))  # the store may be gone
    if (keep := rendezvous.keep_failure) is not None:
        at_most(timing.report_s, lambda: keep(first or failure))  # so may the disk
    for line in _lines(rendezvous.info, failure, first) if first else _lines_alone(rendezvous, failure):
        with suppress(OSError):  # the terminal may be gone
            rendezvous.rank_log.notice(line)
    at_most(timing.leave_s, rendezvous.leave)
    sys.stdout.flush()
    sys.stderr.flush()


def _lines(info: RankInfo, failure: Failure, first: Failure) -> list[str]:
    """Return what this rank prints of `failure`, where `first` was the first of all ranks."""
    by_hand = info.launcher == "environment"  # each rank may have a terminal of its own
    if failure == first and not failure.secondary:
        return [failure.words]
    if failure.rank == info.rank:
        return [failure.words] if by_hand or failure.text != first.text else []
    return [f"rank {info.rank} ends with it: {first.line}"] if by_hand or info.local_rank == 0 else []


def _lines_alone(rendezvous: Rendezvous, failure: Failure) -> list[str]:
    """Return what this rank prints of `failure` where the store is gone, and no rank knows what another prints."""
    info = rendezvous.info
    own = failure.rank == info.rank and not failure.secondary
    with_rank_0 = info.rank > 0 and rendezvous.hosts[0] == rendezvous.rank_log.host
    reports = info.local_rank == int(with_rank_0)  # one for each host; where rank 0 was, which is gone, the next one
    return [failure.words] if own or reports or info.launcher == "environment" else []
