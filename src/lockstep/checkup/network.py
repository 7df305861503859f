"""Findings about the network between ranks: slow links, failed connections, and the network interface of each rank."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from lockstep.checkup.agreement import format_ranks
from lockstep.checkup.finding import Finding
from lockstep.comm.links import Link
from lockstep.device.interfaces import is_loopback

# Each link is compared with the upper quartile of all links of its kind (within or between hosts). The median isn't
# suitable: if one of three hosts has a bad connection, two of the three links are slow.
_QUARTILE: Final = 0.75
_SLOW_FACTOR: Final = (
    3.0  # a link is slow if typical links are faster by this factor; busy machines cause smaller differences
)
_SLOW_LATENCY_S: Final = (
    1e-3  # minimum extra latency of a slow link; on a busy machine, the best of many measurements varies less than this
)
_MIN_MB_S: Final = 50.0  # minimum rate of a link between hosts, less than half of 1 Gbit/s Ethernet
_MIN_LINKS: Final = 3  # minimum number of links of a kind for a comparison
_MAX_SHOWN: Final = 6


def make_link_findings(links: Sequence[Link], hosts: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding for each host whose links are all slow, and for each remaining slow link.

    If no link of a kind is slow, yield a single finding for this kind.
    """
    for kind, between_hosts in (("links within a host", False), ("links between hosts", True)):
        kind_links = [link for link in links if (hosts[link.source] != hosts[link.target]) == between_hosts]
        if not kind_links:
            continue
        typical_mb_s, typical_latency_s = (
            _compute_upper_quartile([link.mb_s for link in kind_links]),
            -_compute_upper_quartile([-link.latency_s for link in kind_links]),
        )
        slow_links = {
            link: reason
            for link in kind_links
            if (reason := _explain_slow_link(link, typical_mb_s, typical_latency_s, len(kind_links), between_hosts))
        }
        yield from _make_slow_findings(kind, slow_links, kind_links, hosts)
        if not slow_links:
            slowest_mb_s = min(link.mb_s for link in kind_links)
            text = (
                f"{len(kind_links)}: {typical_latency_s * 1e6:,.0f} us, {typical_mb_s:,.0f} MB/s; "
                f"the slowest {slowest_mb_s:,.0f} MB/s"
            )
            yield Finding(kind, "ok", text)


def _explain_slow_link(
    link: Link, typical_mb_s: float, typical_latency_s: float, num_links: int, between_hosts: bool
) -> str:
    """Return the reason why a link is slow, or an empty string if it isn't slow."""
    if num_links >= _MIN_LINKS and link.mb_s * _SLOW_FACTOR < typical_mb_s:
        return f"{link.mb_s:,.1f} MB/s, while other links have {typical_mb_s:,.0f}"
    if between_hosts and link.mb_s < _MIN_MB_S:
        return f"{link.mb_s:,.1f} MB/s, less than half of 1 Gbit/s Ethernet"
    if num_links >= _MIN_LINKS and link.latency_s > _SLOW_FACTOR * typical_latency_s + _SLOW_LATENCY_S:
        return f"{link.latency_s * 1e3:,.1f} ms, while other links have {typical_latency_s * 1e3:,.2f}"
    return ""


def _make_slow_findings(
    kind: str, slow_links: Mapping[Link, str], links: Sequence[Link], hosts: Sequence[str]
) -> Iterator[Finding]:
    """Yield a finding for each slow host, unless all hosts are slow, and for each remaining slow link."""
    leads_to = "every step waits for the slowest link"
    slow_hosts = set(_find_slow_hosts(slow_links, links, hosts)) if kind == "links between hosts" else set()
    for host in sorted(slow_hosts):
        host_links = [link for link in slow_links if host in (hosts[link.source], hosts[link.target])]
        worst = min(host_links, key=lambda link: link.mb_s)
        text = f"all {len(host_links)} links of {host} are slow, "
        text += f"the slowest {_describe_link(worst, hosts)}: {slow_links[worst]}"
        remedy = f"check the network card, cable and switch port of {host}"
        yield Finding(kind, "warning", text, leads_to, remedy)
    remaining = [link for link in slow_links if not {hosts[link.source], hosts[link.target]} & slow_hosts]
    remaining.sort(key=lambda link: link.mb_s)
    between_hosts = kind == "links between hosts"
    remedy = "check the network between them" if between_hosts else "check which other processes run there"
    for link in remaining[:_MAX_SHOWN]:
        yield Finding(kind, "warning", f"{_describe_link(link, hosts)}: {slow_links[link]}", leads_to, remedy)
    if len(remaining) > _MAX_SHOWN:
        yield Finding(
            kind, "warning", f"{len(remaining) - _MAX_SHOWN:,} more links are slow; see --json", leads_to, remedy
        )


def _find_slow_hosts(slow_links: Mapping[Link, str], links: Sequence[Link], hosts: Sequence[str]) -> Iterator[str]:
    for host in dict.fromkeys(hosts):
        host_links = [link for link in links if host in (hosts[link.source], hosts[link.target])]
        if host_links and len(host_links) < len(links) and all(link in slow_links for link in host_links):
            yield host


def _describe_link(link: Link, hosts: Sequence[str]) -> str:
    return f"rank {link.source} ({hosts[link.source]}) to rank {link.target} ({hosts[link.target]})"


def _compute_upper_quartile(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(_QUARTILE * len(values)) - 1]


def make_interface_findings(rank_infos: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding about ranks whose gloo interface is slower than the fastest interface of their host."""
    slower: dict[tuple[str, str, int, int], list[int]] = {}
    ranks_by_interface: dict[str, list[int]] = {}
    for rank, rank_info in enumerate(rank_infos if len(set(hosts)) > 1 else ()):
        interfaces, interface = (
            rank_info.get("network", {}).get("interfaces", {}),
            rank_info.get("network", {}).get("gloo"),
        )
        if interface not in interfaces or all(
            map(is_loopback, interfaces[interface]["addresses"])
        ):  # reported by `make_connection_findings`
            continue
        ranks_by_interface.setdefault(interface, []).append(rank)
        fastest = max(interfaces, key=lambda name: int(interfaces[name]["mbit_s"]))
        speed, fastest_speed = interfaces[interface]["mbit_s"], interfaces[fastest]["mbit_s"]
        if 0 < speed < fastest_speed:
            slower.setdefault((interface, fastest, speed, fastest_speed), []).append(rank)
    for (interface, fastest, speed, fastest_speed), ranks in slower.items():
        text = (
            f"{format_ranks(ranks, hosts)}: {interface} with {speed / 1e3:g} Gbit/s, although {fastest} has "
            f"{fastest_speed / 1e3:g}"
        )
        remedy = (
            f"export GLOO_SOCKET_IFNAME={fastest} NCCL_SOCKET_IFNAME={fastest}, if {fastest} reaches the other hosts"
        )
        yield Finding("interface", "warning", text, "communication between hosts uses the slower network", remedy)
    if ranks_by_interface and not slower:
        text = "; ".join(
            f"{interface} on {format_ranks(ranks, hosts)}" for interface, ranks in ranks_by_interface.items()
        )
        yield Finding("interface", "ok", f"between hosts, gloo uses {text}")


def find_unreachable_ranks(rank_infos: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[int]:
    """If there are multiple hosts, return the ranks on which gloo would only listen on the loopback interface."""
    loopback_ranks = [
        rank for rank, rank_info in enumerate(rank_infos) if rank_info.get("network", {}).get("gloo") in ("lo", "lo0")
    ]
    return loopback_ranks if len(set(hosts)) > 1 else []


def make_connection_findings(
    errors: Sequence[str], rank_infos: Sequence[Mapping[str, Any]], hosts: Sequence[str]
) -> Iterator[Finding]:
    """Yield a finding about the ranks that other ranks can't reach, or else about the ranks that failed to connect."""
    ranks = [rank for rank, reason in enumerate(errors) if reason]
    loopback_ranks = find_unreachable_ranks(rank_infos, hosts)
    leads_to = "a run on these ranks cannot start; nothing was measured between them"
    if loopback_ranks:
        text = f"gloo would listen on the loopback interface on {format_ranks(loopback_ranks, hosts)}: not tried"
        yield Finding("connections", "problem", text, leads_to, "see `host name` and `interfaces`")
    elif ranks:
        text = f"{format_ranks(ranks, hosts)} could not connect: {errors[ranks[0]]}"
        remedy = "allow connections between the hosts on all ports, or set GLOO_SOCKET_IFNAME to their common network"
        yield Finding("connections", "problem", text, leads_to, remedy)
