"""scripts/with-etcd starts an etcd for one command, ends with it, has its exit code and leaves nothing behind."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from component import require_etcd, require_hosts
from waiting import killed

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "with-etcd"
# Writes and reads by the client that torch uses, and says where.
WRITE = """
import etcd, json, os
host, port = os.environ["ETCD_ENDPOINT"].split(":")
client = etcd.Client(host, int(port))
client.write("/lockstep", "here")
print(json.dumps([host, client.read("/lockstep").value, client.version, int(os.environ["ETCD_PID"])]))
"""


@pytest.fixture(autouse=True)
def _etcd() -> None:
    require_etcd()


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True)


def test_the_command_finds_it_and_has_the_last_word() -> None:
    done = run(str(SCRIPT), "sh", "-c", f"{sys.executable} -W error -c '{WRITE}'; kill -9 $ETCD_PID; exit 7")
    host, value, version, pid = json.loads(done.stdout)
    assert (host, value, done.stderr) == ("127.0.0.1", "here", "")
    assert version.startswith("3.4.")
    assert pid > 1
    assert done.returncode == 7
    assert not list(Path("/var/lib/etcd").iterdir())


def test_it_listens_where_other_hosts_reach_it() -> None:
    require_hosts()
    hosts = str(SCRIPT.with_name("with-hosts"))
    done = run(hosts, "2", "on", "h0", str(SCRIPT), "--listen", "h0", "on", "h1", sys.executable, "-c", WRITE)
    assert json.loads(done.stdout)[:2] == ["h0", "here"], done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 137), (signal.SIGKILL, -9)])
def test_killed_it_leaves_no_process(tmp_path: Path, number: int, code: int) -> None:
    up = tmp_path / "up"
    assert killed([SCRIPT, "sh", "-c", 'touch "$0"; sleep 100', up], number, up, least=2) == code


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "usage: scripts/with-etcd [--listen HOST] COMMAND [ARGUMENT]..."),
        (("--listen", "127.0.0.1"), "usage: scripts/with-etcd [--listen HOST] COMMAND [ARGUMENT]..."),
        (("--listen", "192.0.2.1", "true"), "--listen 192.0.2.1: Cannot assign requested address"),
    ],
)
def test_what_it_cannot_do(words: tuple[str, ...], said: str) -> None:
    done = run(str(SCRIPT), *words)
    assert (done.returncode, done.stderr) == (2, f"with-etcd: {said}\n")
