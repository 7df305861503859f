"""Runs a rank that was started by an external launcher, such as torchrun.

A rank that fails reports the failure to the rendezvous store, and prints it if no other rank does.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NoReturn

from lockstep.comm.peer_errors import find_peer_error
from lockstep.common.rank import ALONE, RankInfo
from lockstep.errors import LockstepError
from lockstep.ranks.failure import Failure, make_failure
from lockstep.ranks.heartbeat import Heartbeat
from lockstep.ranks.member import end_process, run_as_member, run_with_timeout
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.secret import read_job_secret
from lockstep.ranks.timing import TIMING, Timing


@contextmanager
def join_job(
    info: RankInfo, address: str, timeout_s: float, lost_after_s: float, timing: Timing = TIMING
) -> Iterator[Rendezvous]:
    """Join the other ranks, and send heartbeats during the `with` block. Yields the rendezvous.

    An exception in the block is printed on the terminal and ends this process immediately, even if other threads are
    running.
    """
    rendezvous = Rendezvous(info, timeout_s, _report_and_exit, read_job_secret(os.environ), timing)
    heartbeat = Heartbeat(rendezvous, lost_after_s)
    with run_as_member(rendezvous, address):
        with heartbeat:
            try:
                yield rendezvous
            except Exception as error:
                if find_peer_error(error) is None:
                    raise
                # If no rank reported a failure, for example because the link between two other hosts went down, report
                # the error about the lost peer instead.
                own_failure = replace(make_failure(error, rendezvous.info, rendezvous.rank_log), secondary=False)
                rendezvous.end(heartbeat.find_cause() or own_failure)
        rendezvous.leave()


def exit_before_join(info: RankInfo, address: str, error: LockstepError) -> NoReturn:
    """End this process because of an error that was found before the rendezvous.

    This rank waits for the other ranks for up to `Timing.early_failure_wait_s` seconds, to report the error to them. If
    all ranks found the same error, it is printed once.
    """
    rendezvous = Rendezvous(info, TIMING.early_failure_wait_s, _report_and_exit)
    try:
        rendezvous.secret = read_job_secret(os.environ)
        rendezvous.join(address)
    except (LockstepError, RuntimeError):
        rendezvous.store = None  # there is no other rank to report to
    rendezvous.end(make_failure(error, rendezvous.info, rendezvous.rank_log))


def make_single_process_rendezvous() -> Rendezvous:
    """Return a rendezvous for a run with a single process, which needs no store."""
    return Rendezvous(ALONE, 0.0, _report_and_exit)


def join_ranks(info: RankInfo, address: str, timeout_s: float, timing: Timing = TIMING) -> Rendezvous:
    """Join the other ranks and return the rendezvous."""
    rendezvous = Rendezvous(info, timeout_s, _report_and_exit, read_job_secret(os.environ), timing)
    rendezvous.join(address)
    return rendezvous


def _report_and_exit(rendezvous: Rendezvous, failure: Failure) -> NoReturn:
    end_process(rendezvous, failure, _report_failure)


def _report_failure(rendezvous: Rendezvous, failure: Failure) -> None:
    """Report `failure` to the other ranks, and print the lines that this rank is responsible for."""
    timing = rendezvous.timing
    # The store may no longer exist.
    first = run_with_timeout(timing.report_timeout_s, lambda: rendezvous.report_failure(failure))
    if (save_failure := rendezvous.write_failure) is not None:
        run_with_timeout(timing.report_timeout_s, lambda: save_failure(first or failure))  # the disk may hang
    for line in (
        _format_failure_lines(rendezvous.info, failure, first)
        if first
        else _format_failure_lines_without_store(rendezvous, failure)
    ):
        with suppress(OSError):  # the terminal may no longer exist
            rendezvous.rank_log.write(line)
    run_with_timeout(timing.leave_timeout_s, rendezvous.leave)
    sys.stdout.flush()
    sys.stderr.flush()


def _format_failure_lines(info: RankInfo, failure: Failure, first_failure: Failure) -> list[str]:
    """Return the lines that this rank prints about `failure`. `first_failure` is the first failure among all ranks."""
    started_manually = info.launcher == "environment"  # ranks that were started manually may have separate terminals
    if failure == first_failure and not failure.secondary:
        return [failure.message]
    if failure.rank == info.rank:
        return [failure.message] if started_manually or failure.text != first_failure.text else []
    return (
        [f"rank {info.rank} stops because another rank failed: {first_failure.summary}"]
        if started_manually or info.local_rank == 0
        else []
    )


def _format_failure_lines_without_store(rendezvous: Rendezvous, failure: Failure) -> list[str]:
    """Return the lines that this rank prints about `failure` if the store is gone and the ranks can't coordinate."""
    info = rendezvous.info
    is_cause = failure.rank == info.rank and not failure.secondary
    on_host_of_rank_0 = info.rank > 0 and rendezvous.hosts[0] == rendezvous.rank_log.host
    # On each host, local rank 0 prints the failure. On the host of rank 0, which is gone, local rank 1 does.
    reports_for_host = info.local_rank == int(on_host_of_rank_0)
    return [failure.message] if is_cause or reports_for_host or info.launcher == "environment" else []
