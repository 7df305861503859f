"""One result of the check-up, and how those of several ranks become one list."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

Level = Literal["ok", "warning", "problem"]
ORDER: Final[tuple[Level, ...]] = ("problem", "warning", "ok")


@dataclass(frozen=True)
class Finding:
    """What one check found. `leads_to` and `remedy` are empty where it is ok; `ranks` are empty where all have it."""

    check: str
    level: Level
    found: str
    leads_to: str = ""
    remedy: str = ""
    ranks: tuple[int, ...] = ()


def merge_ranks(by_rank: Mapping[int, Sequence[Finding]]) -> list[Finding]:
    """Return the findings of all ranks, those that are alike as one with their ranks."""
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in by_rank.items():
        for finding in findings:
            ranks.setdefault(finding, []).append(rank)
    return [replace(finding, ranks=() if len(who) == len(by_rank) else tuple(who)) for finding, who in ranks.items()]


def worst(findings: Sequence[Finding]) -> Level:
    """Return the gravest level of all; ok where there are none."""
    return min((finding.level for finding in findings), key=ORDER.index, default="ok")
