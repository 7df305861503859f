"""What was measured between ranks, judged: matrices with a slow host, a slow link, and none."""

from collections.abc import Callable
from typing import Any

from lockstep.checkup.finding import Finding
from lockstep.checkup.network import (
    find_unreachable_ranks,
    make_connection_findings,
    make_interface_findings,
    make_link_findings,
)
from lockstep.comm.links import Link

HOSTS = ["h0", "h1", "h2", "h3"]
TWO = ["h0", "h0", "h1", "h1"]


def full(rate: Callable[[int, int], float], late: Callable[[int, int], float] = lambda *_: 1e-4) -> list[Link]:
    return [
        Link(one, other, late(one, other), rate(one, other)) for one in range(4) for other in range(4) if one != other
    ]


def words(found: list[Finding]) -> list[tuple[str, str]]:
    return [(each.level, each.found) for each in found]


def test_links_that_are_alike_are_fine() -> None:
    found = words([*make_link_findings(full(lambda one, _: 1000 + 100 * one), HOSTS)])
    assert found == [("ok", "12: 100 us, 1,200 MB/s; the slowest 1,000 MB/s")]


def test_a_host_with_slow_links_is_named_and_no_other() -> None:
    found = words([*make_link_findings(full(lambda *pair: 90.0 if 2 in pair else 1200.0), HOSTS)])
    slow = "all 6 links of h2 are slow, the slowest rank 0 (h0) to rank 2 (h2): 90.0 MB/s, while other links have 1,200"
    assert found == [("warning", slow)]


def test_a_slow_host_of_three_is_named_though_most_links_are_slow() -> None:
    links = [link for link in full(lambda *pair: 90.0 if 2 in pair else 1200.0) if 3 not in (link.source, link.target)]
    [(level, text)] = words([*make_link_findings(links, HOSTS)])
    assert (level, text[:31]) == ("warning", "all 4 links of h2 are slow, the")


def test_one_slow_direction_is_named_with_its_ends() -> None:
    [found] = make_link_findings(full(lambda *pair: 90.0 if pair == (3, 1) else 1200.0), HOSTS)
    assert found.found == "rank 3 (h3) to rank 1 (h1): 90.0 MB/s, while other links have 1,200"
    assert found.remedy == "check the network between them"


def test_a_late_link_is_named() -> None:
    [found] = make_link_findings(full(lambda *_: 1000.0, lambda *pair: 0.04 if pair == (0, 1) else 1e-4), HOSTS)
    assert found.found == "rank 0 (h0) to rank 1 (h1): 40.0 ms, while other links have 0.10"


def test_the_only_link_between_two_hosts_is_held_against_ethernet() -> None:
    [found] = make_link_findings([Link(0, 1, 1e-4, 12.0)], HOSTS)
    text = "rank 0 (h0) to rank 1 (h1): 12.0 MB/s, less than half of 1 Gbit/s Ethernet"
    assert (found.level, found.found) == ("warning", text)
    assert [each.level for each in make_link_findings([Link(0, 1, 1e-4, 110.0)], HOSTS)] == ["ok"]


def test_links_within_a_host_are_compared_with_their_like() -> None:
    across = full(lambda one, other: 3000.0 if TWO[one] == TWO[other] else 110.0)
    assert words([*make_link_findings(across, TWO)]) == [
        ("ok", "4: 100 us, 3,000 MB/s; the slowest 3,000 MB/s"),
        ("ok", "8: 100 us, 110 MB/s; the slowest 110 MB/s"),
    ]


def test_of_many_slow_links_the_slowest_are_named() -> None:
    hosts = [f"h{rank}" for rank in range(20)]
    links = [
        Link(one, other, 1e-4, 10.0 if other == one + 1 and one % 2 == 0 else 1000.0)
        for one in range(20)
        for other in range(20)
        if one != other
    ]
    found = [*make_link_findings(links, hosts)]
    assert len(found) == 7
    assert found[-1].found == "4 more links are slow; see --json"


def at(host: int, gloo: str = "eth0") -> dict[str, Any]:
    known = {
        "lo": {"addresses": ["127.0.0.1"], "mbit_s": 0},
        "eth0": {"addresses": [f"10.0.0.{host}"], "mbit_s": 1000},
        "ib0": {"addresses": [f"10.1.0.{host}"], "mbit_s": 100_000},
    }
    return {"network": {"interfaces": known, "gloo": gloo}}


def test_a_slower_interface_than_there_is_is_named() -> None:
    [found] = make_interface_findings([at(0), at(1)], ["h0", "h1"])
    assert (found.level, found.found) == (
        "warning",
        "rank 0 (h0), 1 (h1): eth0 with 1 Gbit/s, although ib0 has 100",
    )
    assert "GLOO_SOCKET_IFNAME=ib0" in found.remedy
    [found] = make_interface_findings([at(0, "ib0"), at(1, "ib0")], ["h0", "h1"])
    assert (found.level, found.found) == (
        "ok",
        "between hosts, gloo uses ib0 on rank 0 (h0), 1 (h1)",
    )


def test_loopback_between_hosts_is_a_problem() -> None:
    facts = [at(0), at(1, "lo")]
    assert find_unreachable_ranks(facts, ["h0", "h1"]) == [1]
    assert find_unreachable_ranks(facts, ["h0", "h0"]) == []
    [found] = make_connection_findings(["not tried", "not tried"], facts, ["h0", "h1"])
    assert (found.level, found.found) == (
        "problem",
        "gloo would listen on the loopback interface on rank 1 (h1): not tried",
    )
    assert (
        [*make_interface_findings([at(0, "lo")] * 2, ["h0", "h1"])]
        == [*make_interface_findings([at(0)] * 2, ["h0", "h0"])]
        == []
    )


def test_who_cannot_connect_is_named() -> None:
    [found] = make_connection_findings(["", "timed out"], [at(0), at(1)], ["h0", "h1"])
    assert (found.level, found.found) == ("problem", "rank 1 (h1) could not connect: timed out")
    assert [*make_connection_findings(["", ""], [at(0), at(1)], ["h0", "h1"])] == []
