"""Opens the listening socket of rank 0, on a single address if possible. Errors name the owner of a port in use."""

import errno
import socket
from contextlib import suppress

import psutil

from lockstep.device.interfaces import is_loopback
from lockstep.errors import UsageError


def check_port(host: str, port: int, is_single_host: bool) -> None:
    """Raise UsageError if rank 0 can't listen at `host` and `port`. For the arguments, see `open_listener`."""
    open_listener(host, port, is_single_host).close()


def open_listener(host: str, port: int, is_single_host: bool) -> socket.socket:
    """Return a socket that listens at the address of `host`. Set `is_single_host` if all ranks are on this host.

    Raises UsageError if rank 0 can't listen at this address. If the port is in use, the error names the process that
    owns it.
    """
    label = f"rendezvous {host}:{port}: rank 0 cannot listen there: "
    if not 1 <= port <= 65535:
        raise UsageError(f"{label}ports go from 1 to 65535; choose a different port")
    try:
        results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # Prefer IPv4. Some names only resolve to IPv6.
        family, *_, address = min(results, key=lambda result: result[0] != socket.AF_INET)
        # Debian resolves the name of the host itself to a loopback address, which other hosts can't reach.
        if not is_single_host and is_loopback(str(address[0])) and not (is_loopback(host) or host == "localhost"):
            return _listen_on_all_interfaces(port)
        return socket.create_server(address, family=family)
    except socket.gaierror as error:
        raise make_unknown_host_error(host, port, error) from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            reason = (error.strerror or str(error)).partition(" (while")[0]
            raise UsageError(f"{label}{reason}; use an address of the host of rank 0, or a different port") from error
        process = find_port_owner(port)
        problem = f"Address already in use{f' by {process}' if process else ''}"
        raise UsageError(f"{label}{problem}; choose a different port, or stop that process") from error


def check_host_name(host: str, port: int) -> None:
    """Raise UsageError if this host can't resolve the name `host`."""
    try:
        socket.getaddrinfo(host, port)
    except socket.gaierror as error:
        raise make_unknown_host_error(host, port, error) from error


def make_unknown_host_error(host: str, port: int, error: OSError) -> UsageError:
    """Return the error to raise if this host can't resolve the name `host`."""
    return UsageError(
        f"rendezvous {host}:{port}: {socket.gethostname()} cannot resolve the host {host} ({error.strerror}); "
        f"use an address of the host of rank 0 instead: placement.rendezvous=tcp://ADDRESS:{port}"
    )


def get_loopback_name() -> str:
    """Return the name of the loopback interface."""
    return "lo" if "lo" in (name for _, name in socket.if_nameindex()) else "lo0"


def _listen_on_all_interfaces(port: int) -> socket.socket:
    """Return a socket that listens on all interfaces, for when the address that other hosts use is unknown."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def find_port_owner(port: int) -> str:
    """Return the process that owns a TCP port, as `pid 17 (command line)`, or "" if it is unknown."""
    with suppress(psutil.Error):  # macOS only allows root to list connections
        # An accepted connection has the port of its listener but can belong to a different process, so list listeners
        # first.
        owners = sorted(
            (connection.status != psutil.CONN_LISTEN, connection.pid)
            for connection in psutil.net_connections("tcp")
            if connection.laddr and connection.laddr.port == port and connection.pid is not None
        )
        for _, pid in owners:
            return f"pid {pid} ({get_command_line(pid)})"
    return ""


def get_command_line(pid: int) -> str:
    """Return the command line of a process, truncated to 200 characters, or "unknown command"."""
    with suppress(psutil.Error):
        text = " ".join(psutil.Process(pid).cmdline())
        if text:
            return text if len(text) <= 200 else f"{text[:197]}..."
    return "unknown command"
