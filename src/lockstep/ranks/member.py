"""One rank of a run, started by any launcher: it joins the others, and any error ends the process at once.

Where the end is reported differs. A rank that Lockstep started writes it to a pipe (ranks/local_launcher.py): the store
of such ranks is a file, and one that is killed or stopped while it writes there leaves it damaged or locked. A rank of
another launcher has nobody above it who reads a pipe, and reports at the store (ranks/external.py).
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
    """Join the other ranks before the block; an error there or in the block ends this process by `rendezvous.end`."""
    try:
        rendezvous.join(address)
        yield
    except PeerFailedError as error:
        rendezvous.end(replace(error.failure, secondary=True))
    except (Exception, SystemExit) as error:  # the user's code may exit
        rendezvous.end(failure_of(error, rendezvous.info, rendezvous.rank_log))


def end_process(rendezvous: Rendezvous, failure: Failure, report: Callable[[Rendezvous, Failure], object]) -> NoReturn:
    """End this process, whatever its other threads do, and even where `report` hangs or fails."""
    try:
        at_most(rendezvous.timing.end_s, lambda: report(rendezvous, failure))
    finally:
        os._exit(failure.exit_code)


def at_most(seconds: float, work: Callable[[], T]) -> T | None:
    """Return what `work` returns, or None where it takes longer, as it may for ever."""
    replies: list[T] = []
    working = threading.Thread(target=lambda: replies.append(work()), daemon=True)
    try:
        working.start()
    except RuntimeError:  # this user may have no more threads
        return work()
    working.join(seconds)
    return replies[0] if replies else None
