"""Detects ranks from RANK and WORLD_SIZE, as set manually or by any launcher that uses torch's variable names."""

from collections.abc import Mapping
from typing import Final

from lockstep.common.rank import RankInfo
from lockstep.launchers.base import Launcher
from lockstep.launchers.variables import Variables, check_range

VARIABLES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MISSING_ADVICE: Final = "set RANK and WORLD_SIZE"


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Return the rank from the environment, or None if RANK and WORLD_SIZE aren't both set."""
    return read_torch_rank(env, "environment") if "RANK" in env and "WORLD_SIZE" in env else None


def check_half_set(env: Mapping[str, str]) -> None:
    """Raise UsageError if only one of RANK and WORLD_SIZE is set."""
    if "RANK" in env or "WORLD_SIZE" in env:
        read_torch_rank(env, "environment")


def read_torch_rank(env: Mapping[str, str], launcher: str) -> RankInfo:
    """Return the rank from torch's variables. LOCAL_RANK defaults to 0, i.e. one process per host.

    Raises UsageError with all missing and invalid values.
    """
    variables = Variables(env, _MISSING_ADVICE)
    rank = variables.read_number("RANK")
    size = variables.read_number("WORLD_SIZE")
    local_rank = variables.read_number("LOCAL_RANK", 0)
    local_size = variables.read_number("LOCAL_WORLD_SIZE", 1)
    port = variables.read_port(None)
    if not variables.problems:
        check_range(variables, "RANK", rank, "WORLD_SIZE", size)
    variables.check()
    return RankInfo(rank, size, local_rank, max(local_size, local_rank + 1), launcher, env.get("MASTER_ADDR"), port)


LAUNCHER: Final = Launcher("environment", detect, VARIABLES)
