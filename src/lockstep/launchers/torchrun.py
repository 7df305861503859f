"""torchrun, and all that is built on torch's elastic agent: torch.distributed.launch and our own local start."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.core.rank import RankInfo
from lockstep.launchers.environment import from_variables


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Return the rank that the elastic agent gave this process, or None."""
    return from_variables(env, "torchrun") if "TORCHELASTIC_RUN_ID" in env else None
