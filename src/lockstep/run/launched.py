"""Which rank this process is, where a launcher started it. Quick: no torch."""

from __future__ import annotations

import os

from lockstep.common.follow_parent import die_with_launcher
from lockstep.common.rank import RankInfo
from lockstep.launchers import detect, located


def launched() -> RankInfo | None:
    """Return this process's rank where a launcher started it, and tie its life to that launcher's."""
    info = detect(os.environ)
    if info is None:
        return None
    die_with_launcher(info.launcher)
    return located(info, os.environ)
