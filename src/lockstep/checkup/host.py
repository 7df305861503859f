"""Checks of a rank's host. Each check is a function that converts information about the host to findings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from lockstep.checkup.finding import Finding
from lockstep.checkup.variables import make_variable_findings
from lockstep.device.interfaces import is_loopback

CheckupInfo = Mapping[str, Any]
Check = Callable[[CheckupInfo, bool], Iterator[Finding]]  # takes `rank_info`, and whether there are multiple hosts


def run_checks(checks: Sequence[tuple[str, Check]], rank_info: CheckupInfo, multi_host: bool) -> list[Finding]:
    """Run RANK_CHECKS or HOST_CHECKS, and return their findings. Skip checks whose section isn't in `rank_info`."""
    return [finding for section, check in checks if section in rank_info for finding in check(rank_info, multi_host)]


def report_timeouts(rank_info: CheckupInfo, _: bool) -> Iterator[Finding]:
    """Yield a finding for each query that timed out. Checks that depend on such a query are skipped."""
    for name, seconds in rank_info["timed_out"].items():
        text, remedy = f"no answer within {seconds:g} s", _HANGS.get(name, "check the system log")
        yield Finding(name, "problem", text, "a run hangs at the same place", remedy)


def report_versions(rank_info: CheckupInfo, _: bool) -> Iterator[Finding]:
    """Yield a finding with the versions of the installed packages."""
    installed = rank_info["versions"]
    names = ("python", "torch", "lockstep", "lockstep's source")
    extras = [f"{name} {version}" for name, version in installed.items() if version and name not in names]
    first = ", ".join(f"{name} {installed[name]}" for name in names)
    yield Finding("versions", "ok", f"{first}; {', '.join(extras)}")


def check_devices(rank_info: CheckupInfo, _: bool) -> Iterator[Finding]:
    """Yield a finding about the devices. If there is a GPU driver but no device, the finding is a warning."""
    gpus = rank_info["cards"]
    if problem := gpus.get("problem"):
        remedy = "run lockstep doctor gpu for details"
        yield Finding("devices", "problem", problem, "lockstep train does not start", remedy)
    elif gpus["devices"]:
        yield Finding("devices", "ok", f"CUDA: {_format_counts(gpus['devices'])}; for details, run lockstep doctor gpu")
    elif gpus["driver"]:
        text, leads_to = "there is a GPU driver, but torch finds no GPU", "a run computes on the CPU"
        yield Finding("devices", "warning", text, leads_to, "run lockstep doctor gpu")
    else:
        yield Finding("devices", "ok", "the CPU: no GPU driver found")


def check_host_name(rank_info: CheckupInfo, multi_host: bool) -> Iterator[Finding]:
    """Check that the host name resolves to an address that other hosts can reach, because gloo listens on it."""
    network, host = rank_info["network"], rank_info["host"]
    addresses, gloo_interface = network["addresses"], rank_info["variables"].get("GLOO_SOCKET_IFNAME")
    text = f"{host} resolves to {', '.join(addresses)}" if addresses else f"{host} does not resolve to an address"
    if gloo_interface or (addresses and not all(map(is_loopback, addresses))):
        yield Finding("host name", "ok", text)
    elif not multi_host:
        yield Finding("host name", "ok", f"{text}: enough for one host; for several hosts, set GLOO_SOCKET_IFNAME")
    else:
        reachable = [
            interface_name
            for interface_name, details in network["interfaces"].items()
            if not all(map(is_loopback, details["addresses"]))
        ]
        leads_to = "gloo listens there, so ranks on other hosts cannot connect"
        remedy = f"set the network address of {host} in /etc/hosts (Debian sets it to 127.0.1.1), or "
        remedy += f"export GLOO_SOCKET_IFNAME={(reachable or ['INTERFACE'])[0]}"
        yield Finding("host name", "problem", f"{text}, so no other host can reach it", leads_to, remedy)


def check_interfaces(rank_info: CheckupInfo, _: bool) -> Iterator[Finding]:
    """List the network interfaces, and check that the variables for gloo and NCCL name interfaces that are up."""
    network, variables = rank_info["network"], rank_info["variables"]
    interfaces = network["interfaces"]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = variables.get(variable, "")
        # NCCL accepts prefixes, exact names after `=`, and names to exclude after `^`.
        prefixes = [prefix for prefix in value.removeprefix("=").split(",") if prefix and not value.startswith("^")]
        if prefixes and not any(interface_name.startswith(tuple(prefixes)) for interface_name in interfaces):
            leads_to = "the ranks cannot connect, so there is no process group"
            remedy = f"unset {variable}, or set it to one of {', '.join(interfaces)}"
            yield Finding("interfaces", "problem", f"{variable}={value}: no such interface is up", leads_to, remedy)
    descriptions = [
        f"{interface_name} {details['addresses'][0]}{_format_speed(details['mbit_s'])}"
        for interface_name, details in interfaces.items()
    ]
    gloo_text = f"; gloo uses {network['gloo']} between hosts" if network["gloo"] else ""
    yield Finding("interfaces", "ok", f"{', '.join(descriptions)}{gloo_text}")


# Each check, with the section of `rank_info` that it needs. If a query timed out, its section is missing.
# RANK_CHECKS run for each rank. HOST_CHECKS run for one rank of each host.
RANK_CHECKS: Final[tuple[tuple[str, Check], ...]] = (
    ("timed_out", report_timeouts),
    ("versions", report_versions),
    ("cards", check_devices),
    ("variables", lambda rank_info, _: make_variable_findings(rank_info["variables"])),
)
HOST_CHECKS: Final[tuple[tuple[str, Check], ...]] = (
    ("network", check_host_name),
    ("network", check_interfaces),
)
_HANGS: Final[Mapping[str, str]] = {
    "network": "the resolver of host names does not answer: check /etc/resolv.conf, or add the hosts to /etc/hosts",
    "host": "a driver hangs: check dmesg",
}


def _format_counts(names: list[str]) -> str:
    return ", ".join(f"{names.count(item)} x {item}" for item in dict.fromkeys(names))


def _format_speed(mbit_s: int) -> str:
    return f" ({mbit_s / 1e3:g} Gbit/s)" if mbit_s > 0 else ""
