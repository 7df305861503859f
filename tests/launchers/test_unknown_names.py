"""Slurm whose node names stand for no address on the hosts: the addresses that Slurm itself has are taken."""

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.common.rank import RankInfo
from lockstep.launchers.slurm import parse_node_address, resolve_master

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

# What scontrol of Slurm 22.05 prints, and the same on one line.
NODE = """NodeName=n1 Arch=x86_64 CoresPerSocket=1
   CPUAlloc=0 CPUEfctv=2 CPUTot=2 CPULoad=0.32
   AvailableFeatures=(null)
   ActiveFeatures=(null)
   Gres=(null)
   NodeAddr=192.0.2.17 NodeHostName=vm Port=17001 Version=22.05.8
   OS=Linux 6.1.0 #1 SMP
   RealMemory=1 AllocMem=0 FreeMem=11312 Sockets=2 Boards=1
   State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=main
"""
NAME = "n1.of-slurm-alone.invalid"
INFO = RankInfo(3, 4, 1, 2, "slurm", NAME, 20016)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where to put what scontrol prints; what it is asked goes to `asked`."""
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncat {tmp_path}/node 2> /dev/null || exit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "node"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (NODE, "192.0.2.17"),
        (" ".join(NODE.split()), "192.0.2.17"),
        (NODE.replace("192.0.2.17", "fd00::17"), "fd00::17"),
        (NODE.replace("   NodeAddr=192.0.2.17 ", "   "), ""),
        ("Node n9 not found\n", ""),
        ("", ""),
    ],
)
def test_the_address_of_a_node(text: str, address: str) -> None:
    assert parse_node_address(text) == address


def test_the_address_that_slurm_has_is_taken_for_a_name_that_nobody_knows(scontrol: Path) -> None:
    scontrol.write_text(NODE)
    assert resolve_master(INFO, {}) == replace(INFO, master="192.0.2.17")
    assert (scontrol.parent / "asked").read_text() == f"show node {NAME}\n"


@pytest.mark.parametrize(
    ("info", "env"),
    [
        (replace(INFO, master="localhost"), {}),
        (replace(INFO, master="192.0.2.1"), {}),
        (INFO, {"MASTER_ADDR": NAME}),
        (replace(INFO, launcher="torchrun"), {}),
    ],
)
def test_a_name_that_is_known_or_was_chosen_stays_and_slurm_is_not_asked(
    scontrol: Path, info: RankInfo, env: dict[str, str]
) -> None:
    scontrol.write_text(NODE)
    assert resolve_master(info, env) is info
    assert not (scontrol.parent / "asked").exists()


@pytest.mark.parametrize(
    ("env", "address"),
    [
        ({}, "192.0.2.5"),
        ({"ENVIRONMENT": ""}, NAME),  # srun of a shell: on whatever host that is
        ({"SLURM_JOB_NODELIST": f"n0,{NAME}"}, NAME),  # a step that does not begin on the job's first host
        ({"SLURM_JOB_NODELIST": "n[1-"}, NAME),
        ({"SLURM_LAUNCH_NODE_IPADDR": "also.unknown.invalid"}, NAME),
        ({"SLURM_LAUNCH_NODE_IPADDR": ""}, NAME),
    ],
)
def test_the_host_of_the_batch_script_is_known_by_where_srun_runs(
    scontrol: Path, env: dict[str, str], address: str
) -> None:
    """Where scontrol fails, as here: its node is none."""
    batch = {"ENVIRONMENT": "BATCH", "SLURM_JOB_NODELIST": f"{NAME},n2", "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.5"}
    assert resolve_master(INFO, batch | env) == replace(INFO, master=address)


def test_a_node_whose_address_is_no_better_known_keeps_its_name(scontrol: Path) -> None:
    scontrol.write_text(NODE.replace("192.0.2.17", NAME))
    assert resolve_master(INFO, {}) == INFO


def test_without_scontrol_the_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/such/folder")
    assert resolve_master(INFO, {}) == INFO
