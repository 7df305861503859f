"""Runs code as a rank: joins the other ranks, and ends the process immediately if the code raises an error.

How a rank reports its failure depends on the launcher:
- If Lockstep started the rank, the rank writes to a pipe (ranks/local_launcher.py). The store of these ranks is a file.
  A rank that is killed or stopped while it writes to this file would leave it damaged or locked.
- If a different launcher started the rank, no parent process reads a pipe. The rank writes to the store
  (ranks/external.py).
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn, TypeVar

from lockstep.ranks.failure import Failure, PeerFailedError, make_failure
from lockstep.ranks.rendezvous import Rendezvous

T = TypeVar("T")


@contextmanager
def run_as_member(rendezvous: Rendezvous, address: str) -> Iterator[None]:
    """Join the other ranks, then run the `with` block. Any error ends this process with `rendezvous.end`."""
    try:
        rendezvous.join(address)
        yield
    except PeerFailedError as error:
        rendezvous.end(replace(error.failure, secondary=True))
    except (Exception, SystemExit) as error:  # user code may call sys.exit
        rendezvous.end(make_failure(error, rendezvous.info, rendezvous.rank_log))


def end_process(rendezvous: Rendezvous, failure: Failure, report: Callable[[Rendezvous, Failure], object]) -> NoReturn:
    """Call `report`, then end this process, even if other threads are running or `report` hangs or fails."""
    try:
        run_with_timeout(rendezvous.timing.end_timeout_s, lambda: report(rendezvous, failure))
    finally:
        os._exit(failure.exit_code)


def run_with_timeout(timeout_s: float, function: Callable[[], T]) -> T | None:
    """Call `function` in a thread and return its result.

    If the call takes longer than `timeout_s` seconds, this function returns None, and the thread keeps running.
    """
    replies: list[T] = []
    worker = threading.Thread(target=lambda: replies.append(function()), daemon=True)
    try:
        worker.start()
    except RuntimeError:  # the user has reached the limit on threads
        return function()
    worker.join(timeout_s)
    return replies[0] if replies else None
