"""What each launcher sets, and what each process makes of it."""

from collections.abc import Mapping

import pytest

from lockstep.core.rank import RankInfo
from lockstep.errors import UsageError
from lockstep.launchers import detect, environment, torchrun

# As torchrun 2.x sets them in the second process of the second of two nodes with two processes each; torch's
# distributed.launch, with and without --use_env, sets the same.
TORCHRUN = {
    "LOCAL_RANK": "1",
    "RANK": "3",
    "GROUP_RANK": "1",
    "ROLE_RANK": "3",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@pytest.mark.parametrize(
    ("env", "info"),
    [
        ({}, None),
        ({"PATH": "/bin", "LOCAL_RANK": "1", "MASTER_ADDR": "node0"}, None),  # left over from something else
        (TORCHRUN, RankInfo(3, 4, 1, 2, "torchrun", "node0", 29500)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, RankInfo(0, 1, 0, 1, "environment")),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"},
            RankInfo(1, 2, 0, 1, "environment", "127.0.0.1", 29501),
        ),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, RankInfo(5, 8, 1, 2, "environment")),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            RankInfo(5, 8, 1, 4, "environment"),
        ),
    ],
)
def test_who_a_process_is(env: Mapping[str, str], info: RankInfo | None) -> None:
    assert detect(env) == info


def test_each_launcher_knows_its_own() -> None:
    by_hand = {"RANK": "0", "WORLD_SIZE": "2"}
    assert torchrun.detect(by_hand) is None
    assert torchrun.detect(TORCHRUN) == detect(TORCHRUN)
    assert environment.detect(by_hand) == RankInfo(0, 2, 0, 1, "environment")


@pytest.mark.parametrize(
    ("env", "problems"),
    [
        ({"RANK": "0"}, ["WORLD_SIZE is not set; set RANK and WORLD_SIZE"]),
        ({"WORLD_SIZE": "2"}, ["RANK is not set; set RANK and WORLD_SIZE"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2 with WORLD_SIZE=2: ranks go from 0 to 1"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK=-1: expected a whole number"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": ""}, ["LOCAL_RANK=: expected a whole number"]),
        (
            {"RANK": "one", "WORLD_SIZE": "two", "MASTER_PORT": "http"},
            [f"{name}: expected a whole number" for name in ("RANK=one", "WORLD_SIZE=two", "MASTER_PORT=http")],
        ),
    ],
)
def test_what_cannot_be_is_told_all_at_once(env: Mapping[str, str], problems: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        detect(env)
    assert str(caught.value).splitlines() == problems
