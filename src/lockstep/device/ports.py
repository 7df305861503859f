"""Where rank 0 is to listen: at one address, and no more of the network than that; and who is there already."""

import errno
import socket
from contextlib import suppress

import psutil

from lockstep.device.interfaces import is_loopback
from lockstep.errors import UsageError


def check(host: str, port: int, near: bool) -> None:
    """Raise UsageError where rank 0 cannot listen at `host`, as `listener` does."""
    listener(host, port, near).close()


def listener(host: str, port: int, near: bool) -> socket.socket:
    """Return a socket that listens at the address that `host` has here; `near`: all ranks are on this host.

    UsageError, with the reason and what to do, where that cannot be; it names who holds a port that is in use.
    """
    place = f"rendezvous {host}:{port}: rank 0 cannot listen there: "
    if not 1 <= port <= 65535:
        raise UsageError(f"{place}ports go from 1 to 65535; choose another port")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)  # a name may have IPv6 alone
        # Debian gives a loopback address to a host's own name, for itself alone.
        if not near and is_loopback(str(address[0])) and not (is_loopback(host) or host == "localhost"):
            return _everywhere(port)
        return socket.create_server(address, family=family)
    except socket.gaierror as error:
        raise unknown(host, port, error) from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            reason = (error.strerror or str(error)).partition(" (while")[0]
            raise UsageError(f"{place}{reason}; name an address of rank 0's host, or another port") from error
        held = holder(port)
        used = f"Address already in use{f' by {held}' if held else ''}"
        raise UsageError(f"{place}{used}; choose another port, or end what holds it") from error


def check_known(host: str, port: int) -> None:
    """Raise UsageError where a name stands for no address on this host."""
    try:
        socket.getaddrinfo(host, port)
    except socket.gaierror as error:
        raise unknown(host, port, error) from error


def unknown(host: str, port: int, error: OSError) -> UsageError:
    """Return the error of a name that stands for no address on this host."""
    return UsageError(
        f"rendezvous {host}:{port}: {socket.gethostname()} does not know the host {host} ({error.strerror}); "
        f"name an address of rank 0's host instead: placement.rendezvous=tcp://ADDRESS:{port}"
    )


def loopback() -> str:
    """Return the name of the interface by which the processes of a host reach each other, and nobody else them."""
    return "lo" if "lo" in (name for _, name in socket.if_nameindex()) else "lo0"


def _everywhere(port: int) -> socket.socket:
    """Return a socket that listens on all interfaces: the other hosts know this one by an address that it does not."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def holder(port: int) -> str:
    """Return who holds a TCP port here, as `pid 17 (command line)`; "" where that is nobody, or not for us to see."""
    with suppress(psutil.Error):  # macOS shows it to root alone
        # Connections that were accepted have the port of their listener, maybe in another process.
        found = sorted(
            (each.status != psutil.CONN_LISTEN, each.pid)
            for each in psutil.net_connections("tcp")
            if each.laddr and each.laddr.port == port and each.pid is not None
        )
        for _, pid in found:
            return f"pid {pid} ({command(pid)})"
    return ""


def command(pid: int) -> str:
    """Return the command line of a process, shortened."""
    with suppress(psutil.Error):
        text = " ".join(psutil.Process(pid).cmdline())
        if text:
            return text if len(text) <= 200 else f"{text[:197]}..."
    return "of no known command"
