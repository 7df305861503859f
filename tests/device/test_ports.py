"""Where rank 0 is to listen: free, held by somebody who is named, or no place at all."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lockstep.device import ports
from lockstep.errors import UsageError

LISTEN = (
    "import socket, sys; server = socket.create_server((sys.argv[1], 0)); "
    "print(server.getsockname()[1], flush=True); sys.stdin.read()"
)


@pytest.fixture
def free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def other() -> Iterator[tuple[int, int]]:
    """Return the pid of another process, and a port on which it, and nobody else, listens at 127.0.0.2."""
    command = [sys.executable, "-c", LISTEN, "127.0.0.2"]
    while True:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            port = int(process.stdout.readline())
            if alone := _free_at("127.0.0.1", port):  # other tests' ranks listen there, on ports of the same range
                yield process.pid, port
            process.kill()
        if alone:
            return


def _free_at(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) != 0


def test_rank_0_listens_at_the_address_that_it_is_given_and_nowhere_else(free: int) -> None:
    for host in ("127.0.0.1", "localhost", "127.0.0.3", *(["::1"] if socket.has_ipv6 else [])):
        for near in (True, False):
            with ports.open_listener(host, free, near) as server:
                assert server.getsockname()[:2] == ("127.0.0.1" if host == "localhost" else host, free)
    assert ports.find_port_owner(free) == ""


def found_as(monkeypatch: pytest.MonkeyPatch, name: str, address: str) -> None:
    """Let a name have this address."""
    known = socket.getaddrinfo

    def found(host: str, port: int, *_: object, **__: object) -> object:
        return known(address if host == name else host, port, type=socket.SOCK_STREAM)

    monkeypatch.setattr(socket, "getaddrinfo", found)


def test_a_name_that_means_loopback_on_this_host_alone_is_listened_at_everywhere(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian has a host's own name in /etc/hosts: other hosts know it by another address."""
    found_as(monkeypatch, "head", "127.0.1.1")
    with ports.open_listener("head", free, is_single_host=True) as server:
        assert server.getsockname() == ("127.0.1.1", free)
    with ports.open_listener("head", free, is_single_host=False):
        for host in ("127.0.0.1", "127.0.0.2", *(["::1"] if socket.has_dualstack_ipv6() else [])):
            socket.create_connection((host, free)).close()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_a_name_that_has_ipv6_alone_can_be_listened_at(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found_as(monkeypatch, "six", "::1")
    ports.check_port("six", free, is_single_host=True)


def test_the_holder_of_a_port_is_named(other: tuple[int, int]) -> None:
    pid, port = other
    ports.check_port("127.0.0.1", port, is_single_host=True)  # another address of the same port
    with pytest.raises(UsageError) as caught:
        ports.check_port("127.0.0.2", port, is_single_host=True)
    held = f"Address already in use by pid {pid} ({sys.executable} -c import socket, sys; server = "
    assert str(caught.value).startswith(f"rendezvous 127.0.0.2:{port}: rank 0 cannot listen there: {held}")
    assert str(caught.value).endswith("sys.stdin.read() 127.0.0.2); choose a different port, or stop that process")


def test_a_long_command_is_cut() -> None:
    command = [sys.executable, "-c", LISTEN, "127.0.0.1", "x" * 300]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        found = ports.find_port_owner(int(process.stdout.readline()))
        process.kill()
    assert found.endswith("...)")
    assert len(found) < 230


def test_a_listener_of_version_6_is_named_too() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        with pytest.raises(UsageError, match=rf"in use by pid {os.getpid()} \("):
            ports.check_port("127.0.0.1", port, is_single_host=True)


def test_who_listens_is_named_not_who_is_connected(other: tuple[int, int]) -> None:
    pid, port = other
    with socket.socket() as connected, socket.create_server(("127.0.0.1", 0)) as server:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        connected.bind(("127.0.0.4", port))
        connected.connect(server.getsockname())
        assert ports.find_port_owner(port).startswith(f"pid {pid} ")


@pytest.mark.parametrize(
    ("host", "port", "problem"),
    [
        ("127.0.0.1", 0, "ports go from 1 to 65535"),
        ("127.0.0.1", 65536, "ports go from 1 to 65535"),
        ("192.0.2.1", 29500, "Cannot assign requested address; use an address of the host of rank 0"),
        (
            "no.such.host.invalid",
            29500,
            r"rendezvous no.such.host.invalid:29500: .* cannot resolve the host no.such.host.invalid \(.*\); use an "
            r"address of the host of rank 0 instead: placement.rendezvous=tcp://ADDRESS:29500",
        ),
    ],
)
def test_places_where_nobody_can_listen(host: str, port: int, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        ports.check_port(host, port, is_single_host=False)
