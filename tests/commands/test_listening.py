"""Where the processes of a run listen: at the loopback interface alone, as long as all of them are on one host."""

import socket
from pathlib import Path

import held
import pytest
from conftest import DIGITS
from forked import Command, as_rank
from waiting import free_port

pytestmark = pytest.mark.slow("runs whole commands")

HELD = ("train", *DIGITS, "recipe.microbatches=4", "run.dir=run")


def test_a_local_run_listens_at_the_loopback_interface_alone(start, tmp_path):
    """Also where variables that are meant for runs on several hosts name another interface."""
    held.hold("run", 2)
    others = {name for _, name in socket.if_nameindex()} - {"lo"}
    outside = {"GLOO_SOCKET_IFNAME": sorted(others)[-1]} if others else {}
    words = ("placement.processes=2", "placement.strategy=zero3", "placement.workers=1")
    command = start(*HELD, *words, **outside)
    command.until((tmp_path / held.HELD).exists)
    assert_on_loopback(command)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_ranks_of_one_host_that_meet_by_a_port_listen_at_the_loopback_interface_alone(start, tmp_path, host):
    held.hold("run", 2)
    port = free_port()
    ranks = [start(*HELD, **as_rank(rank, 2, port) | {"MASTER_ADDR": host}) for rank in range(2)]
    ranks[0].until((tmp_path / held.HELD).exists)
    assert any(address.endswith(f":{port}") for address in listening(ranks[0]))
    for rank in ranks:
        assert_on_loopback(rank)


def assert_on_loopback(command: Command) -> None:
    addresses = listening(command)
    assert addresses, "gloo listens somewhere: this found nothing"
    assert all(address.startswith("127.0.0.1:") for address in addresses), addresses


def listening(command: Command) -> list[str]:
    """Return the addresses at which the processes of a command listen, from /proc/net/tcp and tcp6."""
    sockets = {target for pid in [command.pid, *command.workers()] for target in descriptors(pid)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                address, _, port = local.partition(":")
                shown = socket.inet_ntoa(bytes.fromhex(address)[::-1]) if table == "tcp" else f"[{address}]"
                found.append(f"{shown}:{int(port, 16)}")
    return found


def descriptors(pid: int) -> list[str]:
    return [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()]
