"""The launchers we detect: one file each, pure, and never torch."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.core.rank import RankInfo
from lockstep.launchers import environment, torchrun


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Return what the launcher says of this process, or None where no launcher started it.

    torchrun comes first: it sets the plain variables too.
    """
    return torchrun.detect(env) or environment.detect(env)
