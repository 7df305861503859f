"""The interfaces of this host, and which of them gloo takes."""

import pytest

from lockstep.device import interfaces, ports

FOUND = {
    "lo": {"addresses": ["127.0.0.1", "::1"]},
    "eth0": {"addresses": ["10.0.0.1"]},
    "ib0": {"addresses": ["10.1.0.1"]},
}


@pytest.mark.parametrize(
    ("named", "env", "taken"),
    [
        (["10.1.0.1"], {}, "ib0"),
        (["127.0.1.1"], {}, "lo"),
        (["127.0.1.1"], {"GLOO_SOCKET_IFNAME": "eth0"}, "eth0"),
        (["10.1.0.1"], {"GLOO_SOCKET_IFNAME": "eth9"}, None),
        (["192.0.2.7"], {}, "lo"),  # an address of another host
        (["192.0.2.7", "10.0.0.1"], {}, "eth0"),
        ([], {}, "lo"),
    ],
)
def test_which_interface_gloo_takes(named: list[str], env: dict[str, str], taken: str | None) -> None:
    assert interfaces.find_gloo_interface(FOUND, named, env) == taken


def test_the_interfaces_here() -> None:
    found = interfaces.get_network_info()
    assert "127.0.0.1" in found["interfaces"][ports.get_loopback_name()]["addresses"]
    assert set(found) == {"interfaces", "addresses", "gloo"}


def test_names() -> None:
    assert "127.0.0.1" in interfaces.resolve_addresses("localhost")
    assert interfaces.resolve_addresses("no-such-host.invalid") == []
    assert interfaces.is_loopback("127.0.1.1")
    assert interfaces.is_loopback("::1")
    assert not interfaces.is_loopback("10.0.0.1")
    assert not interfaces.is_loopback("no address")
