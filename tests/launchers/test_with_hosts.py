"""scripts/with-hosts makes hosts whose links can be cut and slowed, ends with its command and leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from component import require_hosts
from waiting import killed

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "with-hosts"
# A port that nobody listens at refuses at once, where it is reached at all.
REACH = "on h0 timeout 1 bash -c '</dev/tcp/h1/1' 2> {0}; echo $? >> {0}"
# Sends 100 kB from h0 to h1 and prints the seconds until all of it has come.
SEND = """
import subprocess, sys
there = [
    "on", "h1", sys.executable, "-c",
    "import socket; s = socket.create_server(('', 5000)); print(flush=True); c = s.accept()[0];"
    "[None for _ in iter(lambda: c.recv(65536), b'')]",
]
here = [
    "on", "h0", sys.executable, "-c",
    "import socket, time; began = time.monotonic(); c = socket.create_connection(('h1', 5000));"
    "c.sendall(bytes(100_000)); c.shutdown(socket.SHUT_WR); c.recv(1); print(time.monotonic() - began)",
]
with subprocess.Popen(there, stdout=subprocess.PIPE) as server:
    server.stdout.readline()
    subprocess.run(here, check=True)
"""

MISSING = "import namespaces, sys; sys.exit(namespaces.run(lambda: 0, ['no-such-program'], 'iproute2'))"


@pytest.fixture(autouse=True)
def _hosts() -> None:
    require_hosts()


def run(*words: str, folder: Path = Path()) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *words], capture_output=True, text=True, cwd=folder)


def test_each_host_has_a_name_and_a_link_and_knows_the_others() -> None:
    seen = "hostname; cat /proc/sys/kernel/hostname; ip -br link | cut -d @ -f 1; getent hosts h0 h1 switch"
    done = run("2", "sh", "-c", f"on h1 sh -c '{seen}'; hostname; exit 7")
    host, again, loopback, link, *addresses, here = done.stdout.splitlines()
    assert (host, again, loopback.split()[:2], link, here) == (
        "h1",
        "h1",
        ["lo", "UNKNOWN"],
        "eth0",
        os.uname().nodename,
    )
    assert [address.split()[:2] for address in addresses] == [
        ["198.51.100.10", "h0"],
        ["198.51.100.11", "h1"],
        ["198.51.100.1", "switch"],
    ]
    assert done.returncode == 7
    assert not Path("/run/hosts").exists()


def test_a_cut_link_is_silent_until_it_is_mended(tmp_path: Path) -> None:
    tries = [REACH.format(name) for name in ("before", "cut", "mended")]
    done = run("2", "sh", "-c", f"{tries[0]}; on h1 --cut; {tries[1]}; on h1 --mend; {tries[2]}", folder=tmp_path)
    assert done.stderr == ""
    before, cut, mended = ((tmp_path / name).read_text(encoding="utf-8") for name in ("before", "cut", "mended"))
    assert "Connection refused" in before
    assert cut == "124\n"
    assert "Connection refused" in mended


def test_a_slow_link_lets_so_much_through(tmp_path: Path) -> None:
    (tmp_path / "send.py").write_text(SEND, encoding="utf-8")
    send = f"{sys.executable} send.py"
    done = run("2", "sh", "-c", f"{send}; on h1 --slow 1mbit; {send}; on h1 --slow none; {send}", folder=tmp_path)
    before, slow, after = map(float, done.stdout.split())
    assert slow > 0.6  # of the 0.8 s at that rate: the bucket holds some
    assert max(before, after) < 0.5


def test_what_runs_on_a_host_hears_signals_and_ends_with_who_started_it(tmp_path: Path) -> None:
    begun = "until grep -qx sleep /proc/$!/comm; do sleep 0.01; done"
    gone = "for i in $(seq 500); do [ -e /proc/$(cat pid) ] || { echo gone; break; }; sleep 0.02; done"
    left = f"(on h0 sleep 100 & echo $! > pid; {begun}); {gone}"
    done = run(
        "1", "sh", "-c", f"on h0 sh -c 'sleep 100' & sleep 0.1; kill $!; wait $!; echo $?; {left}", folder=tmp_path
    )
    assert done.stdout.split() == ["143", "gone"], done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 137), (signal.SIGKILL, -9)])
def test_killed_it_leaves_no_process(tmp_path: Path, number: int, code: int) -> None:
    up = tmp_path / "up"
    assert killed([SCRIPT, "1", "on", "h0", "sh", "-c", 'touch "$0"; sleep 100', up], number, up) == code


@pytest.mark.parametrize("words", [(), ("2",), ("0", "true"), ("many", "true"), ("201", "true")])
def test_without_a_number_and_a_command_it_says_how_it_is_used(words: tuple[str, ...]) -> None:
    done = run(*words)
    said = "with-hosts: usage: scripts/with-hosts N COMMAND [ARGUMENT]..., with N from 1 to 200\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("on h2 true", "on: there is no host h2; there are h0 h1\n"),
        ("on h0", "on: usage: on HOST COMMAND [ARGUMENT]... or on HOST --cut | --mend | --slow RATE\n"),
        ("on h0 --slow", "on: usage: on HOST COMMAND [ARGUMENT]... or on HOST --cut | --mend | --slow RATE\n"),
    ],
)
def test_what_on_cannot_do(words: str, said: str) -> None:
    done = run("2", "sh", "-c", words)
    assert (done.returncode, done.stderr) == (2, said)


def test_a_missing_program_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MISSING, "2", "true"], capture_output=True, text=True, cwd=SCRIPT.parent
    )
    assert (done.returncode, done.stderr) == (2, "-c: not found: no-such-program; install iproute2\n")
