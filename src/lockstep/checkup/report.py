"""The report of a check-up, as JSON and as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from lockstep.checkup.agreement import format_ranks
from lockstep.checkup.finding import ORDER, Finding, Level, get_most_serious_level
from lockstep.common.text import printable_line

if TYPE_CHECKING:  # imports torch, which the check of the launcher doesn't need
    from lockstep.comm.links import Link

_STYLE: Final[dict[Level, str]] = {"problem": "bold red", "warning": "yellow", "ok": "green"}
_MAX_MATRIX_RANKS: Final = (
    12  # maximum number of ranks in the link matrix; most terminals aren't wide enough for more columns
)
_MAX_OK_FINDINGS: Final = 2  # maximum number of ok findings shown per check; further findings are only counted


@dataclass(frozen=True)
class CheckupReport:
    """The full result of a check-up. `hosts` contains the host of each rank, and `seconds` is the duration.

    `title` begins the heading of the printed report.
    """

    hosts: tuple[str, ...]
    seconds: float
    findings: tuple[Finding, ...]
    links: tuple[Link, ...] = ()
    facts: tuple[dict[str, Any], ...] = ()
    title: str = "check-up"

    @property
    def level(self) -> Level:
        """The most serious level of all findings."""
        return get_most_serious_level(self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON-compatible dict."""
        return {"level": self.level, **asdict(self)}


def render(report: CheckupReport) -> Iterator[RenderableType]:
    """Yield the tables and text to print. Problems come first."""
    ranks, hosts = len(report.hosts), len(set(report.hosts))
    extent = f"{ranks} rank{'s'[: ranks > 1]} on {hosts} host{'s'[: hosts > 1]}"
    yield Text(f"{report.title} of {extent}, {report.seconds:.0f} s")
    yield _make_findings_table(report)
    if report.links:
        yield Text("\nbetween ranks: 10^6 bytes per second from the rank in the row to the rank in the column")
        yield _make_link_matrix(report) if ranks <= _MAX_MATRIX_RANKS else _make_slowest_links_table(report)
    counts = {level: sum(finding.level == level for finding in report.findings) for level in ORDER}
    summary = [f"{counts[level]} {level}{'s'[: counts[level] > 1]}" for level in ORDER[:-1] if counts[level]]
    yield Text(f"\n{', '.join(summary) or 'no problem found'}", _STYLE[report.level])


def _make_findings_table(report: CheckupReport) -> Table:
    columns = Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold")
    table = Table(*columns, box=None, pad_edge=False, show_header=False)
    for finding in _select_findings(report.findings):
        ranks = f"  [{format_ranks(finding.ranks, report.hosts)}]" if finding.ranks else ""
        text = Text(printable_line(f"{finding.found}{ranks}"))
        if finding.leads_to:
            text.append(f"\nleads to: {printable_line(finding.leads_to)}", "dim")
        if finding.remedy:
            text.append(f"\nto do: {printable_line(finding.remedy)}", "bold")
        table.add_row(Text(finding.level, _STYLE[finding.level]), finding.check, text)
    return table


def _select_findings(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the findings, with the most serious first. Only a few ok findings are shown for each check."""
    for level in ORDER:
        level_findings = [finding for finding in findings if finding.level == level]
        for check in dict.fromkeys(finding.check for finding in level_findings):
            check_findings = [finding for finding in level_findings if finding.check == check]
            is_abridged = level == "ok" and len(check_findings) > _MAX_OK_FINDINGS
            yield from check_findings[:_MAX_OK_FINDINGS] if is_abridged else check_findings
            if is_abridged:
                omitted = len(check_findings) - _MAX_OK_FINDINGS
                yield Finding(check, "ok", f"and {omitted:,} more like these; see --json")


def _make_link_matrix(report: CheckupReport) -> Table:
    headings = [*map(str, range(len(report.hosts))), "latency"]
    columns = [Column(heading, justify="right", no_wrap=True) for heading in headings]
    table = Table(Column("rank", no_wrap=True), *columns, box=None, pad_edge=False)
    rates = {(link.source, link.target): link.mb_s for link in report.links}
    for rank, host in enumerate(report.hosts):
        row = [_format_rate(rates.get((rank, target))) for target in range(len(report.hosts))]
        latencies = [1e6 * link.latency_s for link in report.links if link.source == rank]
        latency_range = f"{min(latencies):,.0f} to {max(latencies):,.0f} us" if latencies else "-"
        table.add_row(printable_line(f"{rank} {host}"), *row, latency_range)
    return table


def _format_rate(mb_s: float | None) -> str:
    return "-" if mb_s is None else f"{mb_s:,.0f}" if mb_s >= 10 else f"{mb_s:.2f}"


def _make_slowest_links_table(report: CheckupReport) -> Table:
    table = Table("slowest links", f"of {len(report.links):,}", "MB/s", "us", box=None, pad_edge=False)
    for link in sorted(report.links, key=lambda link: link.mb_s)[:_MAX_MATRIX_RANKS]:
        ends = [printable_line(f"rank {rank} ({report.hosts[rank]})") for rank in (link.source, link.target)]
        table.add_row(*ends, _format_rate(link.mb_s), f"{1e6 * link.latency_s:,.0f}")
    return table
