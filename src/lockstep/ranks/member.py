"""A rank of a run: joins the other ranks, and ends its process immediately on any error.

Where a rank reports its end depends on the launcher:
- If Lockstep started the rank, the rank writes to a pipe (ranks/local_launcher.py). The store of these ranks is a file,
  and a rank that is killed or stopped while it writes would leave the file damaged or locked.
- If a different launcher started the rank, no parent process reads a pipe. The rank reports at the store
  (ranks/external.py).
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn, TypeVar

from lockstep.ranks.failure import Failure, PeerFailedError, failure_of
from lockstep.ranks.rendezvous import Rendezvous

T = TypeVar("T")


@contextmanager
def member(rendezvous: Rendezvous, address: str) -> Iterator[None]:
    """Join the other ranks before the block. An error there or in the block ends this process by `rendezvous.end`."""
    try:
        rendezvous.join(address)
        yield
    except PeerFailedError as error:
        rendezvous.end(replace(error.failure, secondary=True))
    except (Exception, SystemExit) as error:  # user code may call sys.exit
        rendezvous.end(failure_of(error, rendezvous.info, rendezvous.rank_log))


def end_process(rendezvous: Rendezvous, failure: Failure, report: Callable[[Rendezvous, Failure], object]) -> NoReturn:
    """End this process, regardless of its other threads and even if `report` hangs or fails."""
    try:
        at_most(rendezvous.timing.end_s, lambda: report(rendezvous, failure))
    finally:
        os._exit(failure.exit_code)


def at_most(seconds: float, work: Callable[[], T]) -> T | None:
    """Return the result of `work`, or None if it takes longer than `seconds`. It may never return."""
    replies: list[T] = []
    worker = threading.Thread(target=lambda: replies.append(work()), daemon=True)
    try:
        worker.start()
    except RuntimeError:  # the thread limit of the user is reached
        return work()
    worker.join(seconds)
    return replies[0] if replies else None
