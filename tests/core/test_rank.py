"""Where ranks meet, by what a launcher said."""

import pytest

from lockstep.core.rank import RankInfo, meeting
from lockstep.errors import UsageError


@pytest.mark.parametrize(
    ("launcher", "master", "rendezvous", "address"),
    [
        ("slurm", "n1", "env://", "tcp://n1:20016"),
        ("environment", "fd00::1", "env://", "tcp://[fd00::1]:20016"),
        ("torchrun", "n1", "env://", "env://"),
        ("slurm", "n1", "tcp://n2:5", "tcp://n2:5"),
        ("openmpi", None, "file:///tmp/meet", "file:///tmp/meet"),
    ],
)
def test_where_ranks_meet(launcher: str, master: str | None, rendezvous: str, address: str) -> None:
    assert meeting(RankInfo(0, 2, 0, 2, launcher, master, 20016), rendezvous) == address


def test_what_a_launcher_does_not_say_is_asked_for_in_its_own_words() -> None:
    with pytest.raises(UsageError, match=r"not both set; set them \(mpirun -x MASTER_ADDR=HOST\), or placement.rendez"):
        meeting(RankInfo(0, 2, 0, 1, "openmpi", None, 20016, "mpirun -x MASTER_ADDR=HOST"), "env://")
    with pytest.raises(UsageError, match=r"not both set; set them, or placement.rendezvous"):
        meeting(RankInfo(0, 2, 0, 1, "environment", "n1", None), "env://")
