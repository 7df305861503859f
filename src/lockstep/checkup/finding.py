"""A finding of the check-up. Findings of several ranks can be merged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

Level = Literal["ok", "warning", "problem"]
ORDER: Final[tuple[Level, ...]] = ("problem", "warning", "ok")


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    `found` describes the result. `leads_to` (the consequence) and `remedy` are empty if the level is ok. `ranks` is
    empty if the finding applies to all ranks.
    """

    check: str
    level: Level
    found: str
    leads_to: str = ""
    remedy: str = ""
    ranks: tuple[int, ...] = ()


def merge_ranks(findings_by_rank: Mapping[int, Sequence[Finding]]) -> list[Finding]:
    """Return the findings of all ranks. Identical findings are merged into a single finding with its ranks."""
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in findings_by_rank.items():
        for finding in findings:
            ranks.setdefault(finding, []).append(rank)
    return [
        replace(finding, ranks=() if len(finding_ranks) == len(findings_by_rank) else tuple(finding_ranks))
        for finding, finding_ranks in ranks.items()
    ]


def get_most_serious_level(findings: Sequence[Finding]) -> Level:
    """Return the most serious level of the findings, or ok if there are no findings."""
    return min((finding.level for finding in findings), key=ORDER.index, default="ok")
