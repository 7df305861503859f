"""Hosts on this machine, in namespaces of their own: a name, a loopback interface and a link to a switch for each."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

PROGRAMS = ("ip", "nsenter", "hostname")
FOLDER = Path("/run/hosts")  # /run is a file system of our own, in memory, and is gone with us
MOST = 200
_NETWORK = "198.51.100"  # for documentation: nobody has these addresses
NAMES = FOLDER / "names"  # what is /etc/hosts here, and on hosts


def open_switch() -> None:
    """Connect this process to the switch, whose name is `switch`."""
    call("mount", "-t", "tmpfs", "tmpfs", "/run")
    FOLDER.mkdir()
    name({})
    call("mount", "--bind", str(NAMES), "/etc/hosts")
    call("ip", "link", "set", "lo", "up")
    call("ip", "netns", "attach", "switch", str(os.getpid()))
    call("ip", "link", "add", "switch", "type", "bridge")
    call("ip", "address", "add", f"{_NETWORK}.1/24", "dev", "switch")
    call("ip", "link", "set", "switch", "up")


def name(hosts: Mapping[str, int], file: Path = NAMES) -> None:
    """Let these names of hosts, by number, be known: on all of them, or where `file` is /etc/hosts."""
    lines = ["127.0.0.1 localhost", f"{_NETWORK}.1 switch {socket.gethostname()}"]
    lines += [f"{_NETWORK}.{10 + number} {host}" for host, number in hosts.items()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def add(host: str, number: int, hostname: str = "") -> None:
    """Add a host with a number from 0 to MOST - 1, which decides its address; `host` names its link too."""
    call("ip", "netns", "add", host)
    call("ip", "link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", host)
    call("ip", "link", "set", host, "master", "switch", "up")
    call("ip", "-netns", host, "address", "add", f"{_NETWORK}.{10 + number}/24", "dev", "eth0")
    for link in ("lo", "eth0"):
        call("ip", "-netns", host, "link", "set", link, "up")
    (FOLDER / host).touch()
    call("unshare", f"--uts={FOLDER / host}", "hostname", hostname or host)


def remove(host: str) -> None:
    """Remove a host on which nothing runs any more."""
    call("ip", "netns", "delete", host)


def entering(host: str) -> list[str]:
    """Return the beginning of a command line that is to run on a host."""
    return ["nsenter", f"--net=/run/netns/{host}", f"--uts={FOLDER / host}"]


def call(*command: str) -> None:
    subprocess.run(command, check=True)
