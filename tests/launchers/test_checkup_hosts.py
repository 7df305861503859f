"""`lockstep doctor` on hosts of their own: a slow link, a name that stands for loopback, a rank that is stopped."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from component import require_hosts

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

WITH_HOSTS = Path(__file__).parent.parent.parent / "scripts" / "with-hosts"
RANKS = """\
export OMP_NUM_THREADS=1 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=h0 MASTER_PORT=29611
doctor="PYTHON -m lockstep doctor --json --timeout 60"
"""
ALL = """\
RANK=1 on h1 $doctor > out1 2> err1 & first=$!
RANK=2 on h2 $doctor > out2 2> err2 & second=$!
RANK=0 on h0 $doctor; code=$?
wait $first; wait $second; exit $code
"""
# On Debian a host's own name is 127.0.1.1 on itself alone.
TRAP = """\
grep -v ' h1$' /etc/hosts > trap; echo '127.0.1.1 h1' >> trap
RANK=1 on h1 unshare --mount sh -c "mount --bind trap /etc/hosts; exec $doctor" > out1 2> err1 & first=$!
RANK=2 on h2 $doctor > out2 2> err2 & second=$!
RANK=0 on h0 $doctor; code=$?
wait $first; wait $second; exit $code
"""
# Stopped once it has connections to others beside the one to the store, over a link that keeps it busy.
STOPPED = """\
on h2 --slow 2mbit
RANK=1 on h1 $doctor > out1 2> err1 & first=$!
RANK=2 on h2 $doctor > out2 2> err2 & second=$!
(until [ $(on h2 sh -c "grep -c ' 01 ' /proc/net/tcp") -gt 2 ]; do sleep 0.1; done; sleep 1; kill -STOP $second) &
RANK=0 on h0 $doctor; code=$?
wait $first; kill -9 $second; exit $code
"""


@pytest.fixture(autouse=True)
def _hosts() -> None:
    require_hosts()


def on_hosts(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    text = RANKS.replace("PYTHON", sys.executable) + script
    return subprocess.run([WITH_HOSTS, "3", "sh", "-c", text], capture_output=True, text=True, cwd=folder)


def findings(done: subprocess.CompletedProcess[str], level: str) -> dict[str, str]:
    return {each["check"]: each["found"] for each in json.loads(done.stdout)["findings"] if each["level"] == level}


def test_a_host_with_a_slow_link_is_named(tmp_path: Path) -> None:
    done = on_hosts(f"on h2 --slow 2mbit\n{ALL}", tmp_path)
    assert done.returncode == 0, done.stderr
    fine = findings(done, "ok")
    assert json.loads(done.stdout)["hosts"] == ["h0", "h1", "h2"]
    assert fine["interface"] == "between hosts, gloo uses eth0 on rank 0 (h0), 1 (h1), 2 (h2)"
    assert (tmp_path / "out1").read_text() == (tmp_path / "out2").read_text() == ""
    assert findings(done, "warning")["links between hosts"].startswith("all 4 links of h2 are slow, the slowest ")
    rates = {(each["source"], each["target"]): each["mb_s"] for each in json.loads(done.stdout)["links"]}
    # 2 Mbit/s are 0.25 MB/s, and more by what the link lets through at once; the other link makes hundreds.
    assert 0.1 < rates[0, 2] < 1 < rates[0, 1] / 4


def test_a_host_whose_name_stands_for_loopback_is_named(tmp_path: Path) -> None:
    done = on_hosts(TRAP, tmp_path)
    assert done.returncode == 4, done.stderr
    bad = findings(done, "problem")
    assert bad["host name"] == "h1 resolves to 127.0.1.1, so no other host can reach it"
    assert bad["connections"] == "gloo would listen on the loopback interface on rank 1 (h1): not tried"


def test_a_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    done = on_hosts(STOPPED, tmp_path)
    assert done.returncode == 1, done.stdout
    signs = ("[rank 2 of 3, h2] error: no heartbeat for ", "rank 2 does not answer: stopped, hung or disconnected")
    assert any(sign in done.stderr for sign in signs), done.stderr
