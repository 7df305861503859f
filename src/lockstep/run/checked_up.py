"""`lockstep doctor`: the check-up in this process, in processes that it starts, or as one rank of a launcher's."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from lockstep.checkup.rank import LOST_AFTER_S, Asked, part
from lockstep.checkup.report import Report
from lockstep.common.rank import RENDEZVOUS_ADDRESS, RENDEZVOUS_ADDRESSES
from lockstep.config.placement import Placement
from lockstep.errors import EXIT_DONE, EXIT_PREFLIGHT, UsageError
from lockstep.launchers import launched_rank
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.run.start import Work, as_launched, on_ranks

Show = Callable[[Report], None]


def check_up(asked: Asked, show: Show, processes: int | None, rendezvous: str, timeout_s: float) -> int:
    """Check up and return the exit code: 4 where there is a problem. Rank 0 gives the report to `show`.

    `processes` are started here, where no launcher did; a rank of a launcher waits at `rendezvous` for the others.
    """
    if not re.match(RENDEZVOUS_ADDRESS, rendezvous):
        raise UsageError(f"--rendezvous: {rendezvous}: expected {RENDEZVOUS_ADDRESSES}")
    info = launched_rank()
    placement = Placement(
        device=asked.device, rendezvous=rendezvous, timeout_s=timeout_s, lost_after_s=min(LOST_AFTER_S, timeout_s)
    )
    if info is None:
        return on_ranks(partial(_work, asked, show), None, placement, processes or 1)

    def opened() -> tuple[Placement, Work]:
        if processes not in (None, info.size):
            raise UsageError(
                f"--processes: {processes} asked for, but {info.launcher} started {info.size}; leave it out"
            )
        return placement, partial(_work, asked, show, None)

    return as_launched(info, [f"placement.rendezvous={rendezvous}"], opened)


def _work(asked: Asked, show: Show, _ready: None, rendezvous: Rendezvous) -> int:
    report = part(asked, rendezvous)
    if report is not None:
        show(report)
    # The same on all ranks: a launcher returns that of whichever it likes.
    problem = report is not None and report.level == "problem"
    return EXIT_PREFLIGHT if rendezvous.tell("problem" if problem else "") else EXIT_DONE
