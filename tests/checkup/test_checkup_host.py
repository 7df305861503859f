"""What a rank found of its host, judged: the good case, and for each check what it warns of."""

from typing import Any

import pytest

from lockstep.checkup.finding import Finding
from lockstep.checkup.host import OF_HOST, OF_RANK, Around, judge

GIB = 1 << 30
ALONE = Around(1, 1, 1)
FOUR = Around(4, 4, 1)
HOSTS = Around(4, 2, 2)


def good(**odd: Any) -> dict[str, Any]:
    lo, eth0 = {"addresses": ["127.0.0.1"], "mbit_s": 0}, {"addresses": ["10.0.0.1"], "mbit_s": 10_000}
    facts: dict[str, Any] = {
        "host": "h0",
        "timed_out": {},
        "versions": {"python": "3.12", "torch": "2.15", "lockstep": "0.1", "lockstep's source": "ab", "timm": "1"},
        "cards": {"devices": [], "driver": False},
        "cores": {"all": 8, "usable": 8, "quota": None, "threads": 8, "load": 0.5},
        "memory": {
            "all": 64 * GIB,
            "free": 60 * GIB,
            "limit": None,
            "swapped": 0,
            "shared": 32 * GIB,
            "shared_free": 32 * GIB,
        },
        "limits": {"files": 4096, "processes": None, "locked_bytes": 8 << 20, "fabric": False},
        "variables": {"OMP_NUM_THREADS": "1"},
        "network": {"interfaces": {"lo": lo, "eth0": eth0}, "addresses": ["10.0.0.1"], "gloo": "eth0"},
        "ports": {"29513": ""},
        "folder": {"folder": "runs", "free": 100 * GIB, "problem": "", "locks": True},
    }
    for name, value in odd.items():
        facts[name] = facts[name] | value
    return facts


def judged(facts: dict[str, Any], around: Around) -> list[Finding]:
    return judge((*OF_RANK, *OF_HOST), facts, around)


def test_all_is_well() -> None:
    found = judged(good(), HOSTS)
    assert {each.level for each in found} == {"ok"}
    assert len({each.check for each in found}) == len(found) == 13
    texts = {each.check: each.found for each in found}
    assert texts["versions"] == "python 3.12, torch 2.15, lockstep 0.1, lockstep's source ab; timm 1"
    assert texts["interfaces"] == "lo 127.0.0.1, eth0 10.0.0.1 (10 Gbit/s); gloo takes eth0 between hosts"
    assert texts["run folder"] == "runs: 100 GiB free"


@pytest.mark.parametrize(
    ("odd", "around", "said"),
    [
        ({"cards": {"driver": True}}, ALONE, "warning devices: a GPU's driver, but torch finds no GPU"),
        ({"cards": {"problem": "no card"}}, ALONE, "problem devices: no card"),
        ({"cores": {"usable": 2}}, FOUR, "warning cores: 2 of 8 usable; 4 ranks here; load 0.5"),
        (
            {"cores": {"usable": 1, "quota": 1.5}},
            FOUR,
            "warning cores: 1 of 8 usable, a container allows the time of 1.5; 4 ranks here; load 0.5",
        ),
        ({"memory": {"free": 2 * GIB}}, FOUR, "warning memory: 2 GiB free of 64 GiB: 512 MiB for each rank"),
        ({"memory": {"limit": GIB // 8}}, ALONE, "problem memory: 128 MiB free of 128 MiB: 128 MiB for each rank"),
        ({"memory": {"swapped": 2 * GIB}}, ALONE, "warning memory: 60 GiB free of 64 GiB, 2 GiB swapped out"),
        (
            {"memory": {"shared": 64 << 20, "shared_free": 64 << 20}},
            ALONE,
            "warning shared memory: /dev/shm: 64 MiB free of 64 MiB",
        ),
        ({"limits": {"files": 512}}, ALONE, "warning open files: at most 512"),
        ({"limits": {"files": 1024}}, Around(200, 8, 25), "problem open files: at most 1,024"),
        ({"limits": {"processes": 500}}, ALONE, "warning processes: at most 500"),
        ({"limits": {"fabric": True}}, ALONE, "warning locked memory: at most 8 MiB"),
        (
            {"network": {"addresses": ["127.0.1.1"]}},
            HOSTS,
            "problem host name: h0 stands for 127.0.1.1, which no other host can reach",
        ),
        (
            {"network": {"addresses": []}},
            HOSTS,
            "problem host name: h0 stands for no address, which no other host can reach",
        ),
        (
            {"variables": {"GLOO_SOCKET_IFNAME": "eth9"}},
            ALONE,
            "problem interfaces: GLOO_SOCKET_IFNAME=eth9: no such interface is up",
        ),
        ({"ports": {"29513": "pid 7 (nc)"}}, ALONE, "warning port: 29513 is held by pid 7 (nc)"),
        ({"folder": {"problem": "Read-only file system"}}, ALONE, "problem run folder: runs: Read-only file system"),
        ({"folder": {"locks": False}}, ALONE, "problem run folder: runs: files cannot be locked"),
        ({"folder": {"free": GIB // 2}}, ALONE, "problem run folder: runs: 512 MiB free"),
    ],
)
def test_what_is_wrong_is_found(odd: dict[str, Any], around: Around, said: str) -> None:
    bad = [each for each in judged(good(**odd), around) if each.level != "ok"]
    assert [f"{each.level} {each.check}: {each.found}" for each in bad] == [said]
    assert bad[0].leads_to
    assert bad[0].remedy


@pytest.mark.parametrize(
    ("odd", "around"),
    [
        ({"network": {"addresses": ["127.0.1.1"]}}, ALONE),
        ({"network": {"addresses": ["127.0.1.1"]}, "variables": {"GLOO_SOCKET_IFNAME": "eth0"}}, HOSTS),
        ({"variables": {"NCCL_SOCKET_IFNAME": "^docker0"}}, ALONE),
        ({"variables": {"NCCL_SOCKET_IFNAME": "=eth0"}}, ALONE),
        ({"memory": {"shared": None, "shared_free": None}}, ALONE),
    ],
)
def test_what_is_no_fault(odd: dict[str, Any], around: Around) -> None:
    assert {each.level for each in judged(good(**odd), around)} == {"ok"}


def test_the_remedy_names_an_interface_that_others_reach() -> None:
    [bad] = [each for each in judged(good(network={"addresses": ["127.0.1.1"]}), HOSTS) if each.level != "ok"]
    assert bad.remedy.endswith("export GLOO_SOCKET_IFNAME=eth0")


def test_what_did_not_answer_is_a_problem_and_the_rest_is_judged() -> None:
    facts = good(timed_out={"run folder": 10.0})
    del facts["folder"]
    [bad] = [each for each in judged(facts, ALONE) if each.level != "ok"]
    assert (bad.check, bad.level, bad.found) == ("run folder", "problem", "no answer within 10 s")
