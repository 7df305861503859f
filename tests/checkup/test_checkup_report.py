"""What people read: the gravest first, what is common once, foreign text made harmless."""

import json
from io import StringIO

from rich.console import Console

from lockstep.checkup.finding import Finding
from lockstep.checkup.report import CheckupReport, render
from lockstep.comm.links import Link

LINKS = (Link(0, 1, 5e-5, 1200.0), Link(1, 0, 7e-5, 0.125))


def printed(report: CheckupReport) -> list[str]:
    stream = StringIO()
    console = Console(file=stream, width=100, highlight=False, markup=False, emoji=False)
    for each in render(report):
        console.print(each)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_the_gravest_come_first_with_what_to_do() -> None:
    bad = Finding("run folder", "problem", "no room", "a run ends", "free some", (1,))
    lines = printed(CheckupReport(("h0", "h1"), 12.4, (Finding("cores", "ok", "8 of 8"), bad), LINKS))
    assert lines[:5] == [
        "check-up of 2 ranks on 2 hosts, 12 s",
        "problem  run folder  no room  [rank 1 (h1)]",
        "                     leads to: a run ends",
        "                     to do: free some",
        "ok       cores       8 of 8",
    ]
    assert [line.split() for line in lines[-5:-2]] == [
        ["rank", "0", "1", "latency"],
        ["0", "h0", "-", "1,200", "50", "to", "50", "us"],
        ["1", "h1", "0.12", "-", "70", "to", "70", "us"],
    ]
    assert lines[-1] == "1 problem"


def test_one_rank_that_is_well() -> None:
    assert printed(CheckupReport(("h0",), 1.0, (Finding("cores", "ok", "8"),)))[-1] == "no problem found"


def test_many_hosts_are_counted_and_their_slowest_links_listed() -> None:
    hosts = tuple(f"h{rank}" for rank in range(20))
    fine = tuple(Finding("host name", "ok", host) for host in hosts)
    links = tuple(Link(rank, rank + 1, 1e-4, 100.0 + rank) for rank in range(19))
    lines = printed(CheckupReport(hosts, 1.0, fine, links))
    assert [line.split(maxsplit=3)[3] for line in lines if "host name" in line] == [
        "h0",
        "h1",
        "and 18 more like these; see --json",
    ]
    assert sum("rank " in line and "(h" in line for line in lines) == 12


def test_what_others_wrote_moves_no_cursor() -> None:
    lines = printed(CheckupReport(("h0",), 1.0, (Finding("variables", "ok", "OMP_PLACES=\x1b[2J[red]"),)))
    assert lines[1].endswith("OMP_PLACES=\\x1b[2J[red]")


def test_json_has_all_of_it() -> None:
    report = CheckupReport(("h0", "h1"), 1.0, (Finding("cores", "warning", "1"),), LINKS)
    said = json.loads(json.dumps(report.as_json()))
    assert said["level"] == "warning"
    assert said["links"][1] == {"source": 1, "target": 0, "latency_s": 7e-5, "mb_s": 0.125}
