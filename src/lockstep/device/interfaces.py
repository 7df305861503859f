"""The network of this host: its interfaces, what its name stands for, and which interface the ranks' traffic takes."""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, Final

import psutil

_VARIABLE: Final = "GLOO_SOCKET_IFNAME"


def network() -> dict[str, Any]:
    """Return the interfaces that are up, what this host's own name stands for, and which interface gloo would take."""
    found, named = interfaces(), addresses(socket.gethostname())
    return {"interfaces": found, "addresses": named, "gloo": gloo_interface(found, named, os.environ)}


def interfaces() -> dict[str, dict[str, Any]]:
    """Return the interfaces that are up and have an address: their addresses, MTU and speed in Mbit/s (0: unknown)."""
    states = psutil.net_if_stats()
    found = {}
    for name, listed in psutil.net_if_addrs().items():
        own = [each.address.partition("%")[0] for each in listed if each.family in (socket.AF_INET, socket.AF_INET6)]
        if own and name in states and states[name].isup:
            found[name] = {"addresses": own, "mbit_s": states[name].speed, "mtu": states[name].mtu}
    return found


def addresses(host: str) -> list[str]:
    """Return the addresses that a name stands for here; none where it is not known."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))


def is_loopback(address: str) -> bool:
    """Return whether no other host can reach an address."""
    with suppress(ValueError):
        return ip_address(address.partition("%")[0]).is_loopback
    return False


def gloo_interface(found: Mapping[str, Any], named: list[str], env: Mapping[str, str]) -> str | None:
    """Return the interface that gloo takes for a job of several hosts, None where that is unknown.

    It is that of GLOO_SOCKET_IFNAME, else the one with the first address of the host's own name that is this host's,
    else loopback (torch, `ProcessGroupGloo::createDefaultDevice`).
    """
    if _VARIABLE in env:
        first = env[_VARIABLE].partition(",")[0]
        return first if first in found else None
    owners = [owner(address, found) for address in named]
    return next((name for name in owners if name), owner("127.0.0.1", found))


def owner(address: str, found: Mapping[str, Any]) -> str | None:
    """Return which of the interfaces has an address; all of 127.0.0.0/8 is loopback's."""
    for name, interface in found.items():
        if address in interface["addresses"] or (is_loopback(address) and "127.0.0.1" in interface["addresses"]):
            return name
    return None
