"""RANK and WORLD_SIZE set by hand, or by any launcher that follows torch's names."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.core.rank import RankInfo
from lockstep.errors import UsageError


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Return the rank that the variables tell, or None where neither RANK nor WORLD_SIZE is set."""
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    return from_variables(env, "environment")


def from_variables(env: Mapping[str, str], launcher: str) -> RankInfo:
    """Read torch's variables; LOCAL_RANK left out means a process for each host's only device, number 0.

    Missing or impossible values raise UsageError, all of them at once.
    """
    problems: list[str] = []
    rank = _number(env, "RANK", None, problems)
    size = _number(env, "WORLD_SIZE", None, problems)
    local_rank = _number(env, "LOCAL_RANK", 0, problems)
    local_size = _number(env, "LOCAL_WORLD_SIZE", 1, problems)
    port = _number(env, "MASTER_PORT", 0, problems)
    if not problems and not 0 <= rank < size:
        problems.append(f"RANK={rank} with WORLD_SIZE={size}: ranks go from 0 to {size - 1}")
    if problems:
        raise UsageError("\n".join(problems))
    return RankInfo(
        rank,
        size,
        local_rank,
        max(local_size, local_rank + 1),
        launcher,
        env.get("MASTER_ADDR"),
        port or None,
    )


def _number(env: Mapping[str, str], name: str, default: int | None, problems: list[str]) -> int:
    text = env.get(name)
    if text is not None and text.isdecimal():
        return int(text)
    if text is None and default is not None:
        return default
    problems.append(
        f"{name} is not set; set RANK and WORLD_SIZE" if text is None else f"{name}={text}: expected a whole number"
    )
    return 0
