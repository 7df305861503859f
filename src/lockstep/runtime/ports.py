"""Where rank 0 is to listen: whether it can, and who is there already."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from lockstep.errors import UsageError

_LISTENING: Final = "0A"  # in /proc/net/tcp (include/net/tcp_states.h)


def check(host: str, port: int) -> None:
    """Raise UsageError where this process cannot listen at `host`, with the reason; a port in use with its holder."""
    problem = trouble(host, port)
    if problem:
        raise UsageError(f"rendezvous {host}:{port}: rank 0 cannot listen there: {problem}")


def trouble(host: str, port: int) -> str:
    """Return why this process cannot listen at `host` and what to do, or "" where it can.

    torch listens on all addresses, whichever is named; that `host` is one of this machine's is looked at as well.
    """
    if not 1 <= port <= 65535:
        return "ports go from 1 to 65535; choose another port"
    try:
        for address in (host, ""):
            found = socket.getaddrinfo(address or "0.0.0.0", port, type=socket.SOCK_STREAM)
            family, *_, place = min(found, key=lambda each: each[0] != socket.AF_INET)  # a name may have IPv6 alone
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return f"{error.strerror}; name an address of rank 0's host, or another port"
        held = holder(port)
        return f"{error.strerror}{f' by {held}' if held else ''}; choose another port, or end what holds it"
    return ""


def holder(port: int) -> str:
    """Return who holds a TCP port here, as `pid 17 (command line)`; "" where that is nobody, or not for us to see."""
    inodes = set(_inodes(port))
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)) if inodes else ():
        if inodes & set(_sockets(process)):
            return f"pid {process.name} ({_command(process)})"
    return ""


def _inodes(port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that have this port here: of those that listen, if there are any."""
    rows = [row for name in ("tcp", "tcp6") for row in _table(name) if int(row[1].rpartition(":")[2], 16) == port]
    listening = [row for row in rows if row[3] == _LISTENING]
    for row in listening or rows:
        yield row[9]


def _table(name: str) -> list[list[str]]:
    try:
        lines = Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]
    except OSError:  # no Linux, or no such protocol
        return []
    return [line.split() for line in lines]


def _sockets(process: Path) -> Iterator[str]:
    """Yield the inodes of a process's sockets; nothing where it is not ours to see, or has gone."""
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                target = os.readlink(descriptor)
                if target.startswith("socket:["):
                    yield target[len("socket:[") : -1]


def _command(process: Path) -> str:
    with suppress(OSError):
        words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        text = b" ".join(words).decode(errors="replace")
        if text:
            return text if len(text) <= 200 else f"{text[:197]}..."
    return "of no known command"
