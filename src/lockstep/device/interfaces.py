"""The network of this host: its interfaces, the addresses of its host name, and the interface that gloo uses."""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, Final

import psutil

_VARIABLE: Final = "GLOO_SOCKET_IFNAME"


def get_network_info() -> dict[str, Any]:
    """Return the interfaces that are up, the addresses of the host name, and the interface that gloo would use."""
    up_interfaces, host_addresses = list_interfaces(), resolve_addresses(socket.gethostname())
    return {
        "interfaces": up_interfaces,
        "addresses": host_addresses,
        "gloo": find_gloo_interface(up_interfaces, host_addresses, os.environ),
    }


def list_interfaces() -> dict[str, dict[str, Any]]:
    """Return the interfaces that are up and have an address, by name.

    Each entry contains the addresses, the speed in Mbit/s (0 if unknown) and the MTU.
    """
    states = psutil.net_if_stats()
    up_interfaces = {}
    for name, listed in psutil.net_if_addrs().items():
        own_addresses = [
            entry.address.partition("%")[0] for entry in listed if entry.family in (socket.AF_INET, socket.AF_INET6)
        ]
        if own_addresses and name in states and states[name].isup:
            up_interfaces[name] = {"addresses": own_addresses, "mbit_s": states[name].speed, "mtu": states[name].mtu}
    return up_interfaces


def resolve_addresses(host: str) -> list[str]:
    """Resolve a host name and return its addresses, or [] if the name is unknown."""
    try:
        results = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in results))


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address, which other hosts can't reach."""
    with suppress(ValueError):
        return ip_address(address.partition("%")[0]).is_loopback
    return False


def find_gloo_interface(
    up_interfaces: Mapping[str, Any], host_addresses: list[str], env: Mapping[str, str]
) -> str | None:
    """Return the name of the interface that gloo uses for a job on several hosts, or None if it is unknown.

    If GLOO_SOCKET_IFNAME is set, gloo uses that interface. Otherwise, gloo resolves the host name, and uses the first
    address that belongs to an interface of this host. If there is none, gloo uses the loopback interface (see
    `ProcessGroupGloo::createDefaultDevice` in torch).
    """
    if _VARIABLE in env:
        first = env[_VARIABLE].partition(",")[0]
        return first if first in up_interfaces else None
    owners = [find_interface(address, up_interfaces) for address in host_addresses]
    return next((name for name in owners if name), find_interface("127.0.0.1", up_interfaces))


def find_interface(address: str, up_interfaces: Mapping[str, Any]) -> str | None:
    """Return the name of the interface with the address `address`, or None if there is none.

    All addresses in 127.0.0.0/8 belong to the loopback interface.
    """
    for name, interface in up_interfaces.items():
        if address in interface["addresses"] or (is_loopback(address) and "127.0.0.1" in interface["addresses"]):
            return name
    return None
