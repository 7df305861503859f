"""Finds values that differ between ranks, and names the ranks that have each value."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from lockstep.checkup.finding import Finding, Level
from lockstep.common.rank import format_ranks_with_hosts

_MAX_RANKS: Final = 8  # maximum number of ranks listed for a value
# Variables that may differ between ranks: launchers set some of them for each rank, and interface names can differ
# between hosts.
_PER_RANK_VARIABLES: Final = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "OMP_PLACES", "KMP_AFFINITY"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
)
_REQUIRED_EQUAL: Final = ("python", "lockstep", "lockstep's source", "torch")
_REJECTED: Final = "lockstep train rejects ranks with different values"
_MAY_DIFFER: Final = "the ranks may compute or communicate differently, or wait for each other forever"


def compare_ranks(rank_infos: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[Finding]:
    """Return a finding for each difference between ranks. If there are none, return a single finding that says so."""
    findings = [
        *_compare_section(
            rank_infos, hosts, "versions", lambda name: "problem" if name in _REQUIRED_EQUAL else "warning"
        ),
        *_compare_section(rank_infos, hosts, "numerics", lambda _: "problem"),
        *_compare_section(rank_infos, hosts, "variables", lambda _: "warning"),
        *_compare_devices(rank_infos, hosts),
    ]
    if findings or len(rank_infos) == 1:
        return findings
    return [
        Finding("ranks alike", "ok", f"versions, CPU, devices and variables are the same on {len(rank_infos)} ranks")
    ]


def _compare_section(
    rank_infos: Sequence[Mapping[str, Any]], hosts: Sequence[str], section: str, get_level: Callable[[str], Level]
) -> Iterator[Finding]:
    sections = [rank_info.get(section, {}) for rank_info in rank_infos]
    for name in dict.fromkeys(
        name for section_values in sections for name in section_values if name not in _PER_RANK_VARIABLES
    ):
        differing_values = describe_values([section_values.get(name) for section_values in sections], hosts)
        if differing_values:
            level = get_level(name)
            leads_to = _REJECTED if level == "problem" else _MAY_DIFFER
            text = f"{name}: {differing_values}"
            yield Finding("ranks alike", level, text, leads_to, "make it the same on all hosts")


def _compare_devices(rank_infos: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Iterator[Finding]:
    device_names = [
        ", ".join(sorted(set(rank_info.get("cards", {}).get("devices", [])))) or "the CPU" for rank_info in rank_infos
    ]
    if differing_values := describe_values(device_names, hosts):
        leads_to = "the same bits are only promised on one kind of device, and lockstep train rejects ranks on several"
        remedy = "use hosts with one kind of device, or placement.device=cpu"
        yield Finding("ranks alike", "problem", f"devices: {differing_values}", leads_to, remedy)


def describe_values(rank_values: Sequence[Any], hosts: Sequence[str]) -> str:
    """List each value with its ranks, as text. Return an empty string if all ranks have the same value.

    The most common value comes first.
    """
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(rank_values):
        groups.setdefault("missing" if value is None else _format_value(value), []).append(rank)
    if len(groups) < 2:
        return ""
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    return "; ".join(f"{value} on {format_ranks(ranks, hosts)}" for value, ranks in ordered)


def format_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Format ranks with their hosts, such as `rank 2 (b), 3 (b)`. Long lists are truncated."""
    text = format_ranks_with_hosts(ranks[:_MAX_RANKS], hosts)
    return text if len(ranks) <= _MAX_RANKS else f"{text} and {len(ranks) - _MAX_RANKS:,} more"


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
