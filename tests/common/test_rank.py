"""Where ranks meet, by what a launcher said."""

import pytest

from lockstep.common.rank import RankInfo, format_ranks_with_hosts, resolve_rendezvous_address
from lockstep.errors import UsageError


@pytest.mark.parametrize(
    ("launcher", "master", "rendezvous", "address"),
    [
        ("slurm", "n1", "env://", "tcp://n1:20016"),
        ("environment", "fd00::1", "env://", "tcp://[fd00::1]:20016"),
        ("torchrun", "n1", "env://", "tcp://n1:20016"),
        ("slurm", "n1", "tcp://n2:5", "tcp://n2:5"),
        ("openmpi", None, "file:///tmp/meet", "file:///tmp/meet"),
    ],
)
def test_where_ranks_meet(launcher: str, master: str | None, rendezvous: str, address: str) -> None:
    assert resolve_rendezvous_address(RankInfo(0, 2, 0, 2, launcher, master, 20016), rendezvous) == address


def test_what_a_launcher_does_not_say_is_asked_for_in_its_own_words() -> None:
    with pytest.raises(
        UsageError, match=r"not both set; set them \(mpirun -x MASTER_ADDR=HOST\), or set placement.ren"
    ):
        resolve_rendezvous_address(RankInfo(0, 2, 0, 1, "openmpi", None, 20016, "mpirun -x MASTER_ADDR=HOST"), "env://")
    with pytest.raises(UsageError, match=r"not both set; set them, or set placement.rendezvous"):
        resolve_rendezvous_address(RankInfo(0, 2, 0, 1, "environment", "n1", None), "env://")


@pytest.mark.parametrize(
    "rendezvous", ["tcp://localhost", "tcp://:5", "tcp://a:b", "tcp://a:0", "tcp://a:65536", "file://meet", "a:5", ""]
)
def test_what_is_no_place_is_told(rendezvous: str) -> None:
    with pytest.raises(UsageError, match=f"rendezvous {rendezvous}: expected env://, tcp://HOST:PORT or file:///PATH"):
        resolve_rendezvous_address(RankInfo(0, 2, 0, 2, "environment", "n1", 20016), rendezvous)


def test_ranks_are_told_with_their_hosts_where_those_are_known() -> None:
    assert format_ranks_with_hosts([1, 3], ["a", "a", "b", "b"]) == "rank 1 (a), 3 (b)"
    assert format_ranks_with_hosts([1, 3], ["a"]) == "rank 1, 3"
