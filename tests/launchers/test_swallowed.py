"""Where a firewall swallows what ranks send each other, but not what they say where they met, all are told of it."""

import subprocess
import sys
from pathlib import Path

import pytest
from component import require_hosts

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

HOSTS = Path(__file__).parent.parent.parent / "scripts" / "with-hosts"
# From h1 only what goes to port 29511 comes to h0: the rest goes to a gateway that is not there.
HINDERED = """
on h1 ip neigh replace 198.51.100.99 lladdr 02:00:00:00:00:99 dev eth0 nud permanent
on h1 ip route add default via 198.51.100.99 dev eth0 table 100
on h1 ip rule add pref 10 ipproto tcp dport 29511 lookup main
on h1 ip rule add pref 12 to 198.51.100.10 lookup 100
on h1 "$@" 1 & on h0 "$@" 0 & wait -n
"""
RANK = """
import os, sys
import torch
from lockstep.common.rank import RankInfo
from lockstep.ranks.external import join_ranks
from lockstep.ranks.stall import StallDetector
from lockstep.comm.world import open_world

def tell(report):
    print(report, flush=True)
    os._exit(7)

rendezvous = join_ranks(RankInfo(int(sys.argv[1]), 2, 0, 1, "test"), "tcp://h0:29511", 30)
with StallDetector(rendezvous, 1, tell):
    open_world(rendezvous, torch.device("cpu"))
"""


def test_ranks_that_do_not_reach_each_other_say_so() -> None:
    require_hosts()
    command = [HOSTS, "2", "bash", "-c", HINDERED, "bash", sys.executable, "-c", RANK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    first, waits, last, *_ = done.stdout.splitlines()
    assert first.startswith("stalled: rank ")
    assert waits.startswith("  rank 0, 1 waits: setting up, lockstep/comm/world.py:")
    assert waits.endswith(" open_world")
    assert last == "  no rank is late: the ranks wait for each other, at different places or over a broken link"
