"""What a rank found of its host, judged: the good case, and for each check what it warns of."""

from typing import Any

import pytest

from lockstep.checkup.finding import Finding
from lockstep.checkup.host import HOST_CHECKS, RANK_CHECKS, run_checks

ALONE, HOSTS = False, True  # whether there are several hosts


def good(**odd: Any) -> dict[str, Any]:
    lo, eth0 = {"addresses": ["127.0.0.1"], "mbit_s": 0}, {"addresses": ["10.0.0.1"], "mbit_s": 10_000}
    facts: dict[str, Any] = {
        "host": "h0",
        "timed_out": {},
        "versions": {"python": "3.12", "torch": "2.15", "lockstep": "0.1", "lockstep's source": "ab", "timm": "1"},
        "cards": {"devices": [], "driver": False},
        "variables": {"OMP_NUM_THREADS": "1"},
        "network": {"interfaces": {"lo": lo, "eth0": eth0}, "addresses": ["10.0.0.1"], "gloo": "eth0"},
    }
    for name, value in odd.items():
        facts[name] = facts[name] | value
    return facts


def judged(facts: dict[str, Any], several: bool) -> list[Finding]:
    return run_checks((*RANK_CHECKS, *HOST_CHECKS), facts, several)


def test_all_is_well() -> None:
    found = judged(good(), HOSTS)
    assert {each.level for each in found} == {"ok"}
    assert len({each.check for each in found}) == len(found) == 5
    texts = {each.check: each.found for each in found}
    assert texts["versions"] == "python 3.12, torch 2.15, lockstep 0.1, lockstep's source ab; timm 1"
    assert texts["interfaces"] == "lo 127.0.0.1, eth0 10.0.0.1 (10 Gbit/s); gloo uses eth0 between hosts"


@pytest.mark.parametrize(
    ("odd", "several", "said"),
    [
        ({"cards": {"driver": True}}, ALONE, "warning devices: there is a GPU driver, but torch finds no GPU"),
        ({"cards": {"problem": "no card"}}, ALONE, "problem devices: no card"),
        (
            {"network": {"addresses": ["127.0.1.1"]}},
            HOSTS,
            "problem host name: h0 resolves to 127.0.1.1, so no other host can reach it",
        ),
        (
            {"network": {"addresses": []}},
            HOSTS,
            "problem host name: h0 does not resolve to an address, so no other host can reach it",
        ),
        (
            {"variables": {"GLOO_SOCKET_IFNAME": "eth9"}},
            ALONE,
            "problem interfaces: GLOO_SOCKET_IFNAME=eth9: no such interface is up",
        ),
    ],
)
def test_what_is_wrong_is_found(odd: dict[str, Any], several: bool, said: str) -> None:
    bad = [each for each in judged(good(**odd), several) if each.level != "ok"]
    assert [f"{each.level} {each.check}: {each.found}" for each in bad] == [said]
    assert bad[0].leads_to
    assert bad[0].remedy


@pytest.mark.parametrize(
    ("odd", "several"),
    [
        ({"network": {"addresses": ["127.0.1.1"]}}, ALONE),
        ({"network": {"addresses": ["127.0.1.1"]}, "variables": {"GLOO_SOCKET_IFNAME": "eth0"}}, HOSTS),
        ({"variables": {"NCCL_SOCKET_IFNAME": "^docker0"}}, ALONE),
        ({"variables": {"NCCL_SOCKET_IFNAME": "=eth0"}}, ALONE),
    ],
)
def test_what_is_no_fault(odd: dict[str, Any], several: bool) -> None:
    assert {each.level for each in judged(good(**odd), several)} == {"ok"}


def test_the_remedy_names_an_interface_that_others_reach() -> None:
    [bad] = [each for each in judged(good(network={"addresses": ["127.0.1.1"]}), HOSTS) if each.level != "ok"]
    assert bad.remedy.endswith("export GLOO_SOCKET_IFNAME=eth0")


def test_what_did_not_answer_is_a_problem_and_the_rest_is_judged() -> None:
    facts = good(timed_out={"network": 8.0})
    del facts["network"]
    [bad] = [each for each in judged(facts, ALONE) if each.level != "ok"]
    assert (bad.check, bad.level, bad.found) == ("network", "problem", "no answer within 8 s")
