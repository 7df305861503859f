"""Which device a process takes, as each launcher starts it and shows it devices."""

import pytest
import torch
from environments import ENV

from lockstep.comm.world import choose_device
from lockstep.common.rank import RankInfo
from lockstep.errors import UsageError
from lockstep.launchers import detect

MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"}
STARTED = {  # task 5 of 8, local rank 1 of 4
    "torchrun": {
        "TORCHELASTIC_RUN_ID": "a",
        "RANK": "5",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
    }
    | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
    "environment": {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    | {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
    "openmpi": MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
    "mpich": {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
    "slurm": ENV.slurm_block
    | {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
}


@pytest.fixture
def card(monkeypatch):
    """Return which device a process takes that sees so many, with this in CUDA_VISIBLE_DEVICES."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    def chosen(info: RankInfo, visible: int, listed: str | None, device: str = "auto") -> torch.device:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if listed is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
        return choose_device(device, info)  # type: ignore[arg-type]

    return chosen


@pytest.mark.parametrize("launcher", STARTED)
def test_the_device_of_a_rank_under_each_launcher(card, launcher) -> None:
    info = detect(STARTED[launcher])
    assert (info.launcher, info.rank, info.local_rank, info.local_size) == (launcher, 5, 1, 4)
    assert card(info, 4, None) == torch.device("cuda", 1)  # all of the host
    assert card(info, 4, "0,1,2,3") == torch.device("cuda", 1)
    assert card(info, 8, None) == torch.device("cuda", 1)  # more than ranks
    for own in ("3", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"):
        assert card(info, 1, own) == torch.device("cuda", 0)  # each rank one of its own
    assert card(info, 0, "") == torch.device("cpu")  # none, and none asked for
    with pytest.raises(
        UsageError, match=r"^placement\.device: cuda is not available.* run lockstep doctor gpu to find"
    ):
        card(info, 0, "", "cuda")
    for visible, listed in ((2, "0,1"), (1, None)):  # fewer than ranks
        with pytest.raises(UsageError, match=r"4 processes on this host but .* use at most"):
            card(info, visible, listed)
