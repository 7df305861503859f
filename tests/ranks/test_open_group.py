"""A process group that a script has opened itself is joined, or refused."""

import socket
from pathlib import Path
from typing import Any

import loops
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from one_process import joined
from torch import nn
from torch.optim import SGD

import lockstep
from lockstep.comm.world import open_world
from lockstep.errors import UsageError
from lockstep.ranks.external import make_single_process_rendezvous
from lockstep.ranks.open_group import find_rank_in_open_group


def train(run: Any) -> str:
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2), nn.Linear(5, 3))
    model, _ = run.place(model, SGD(model.parameters(), lr=0.1))
    for step, *batch in loops.micro_batches(loops.steps(run)):
        step.backward(sum=loops.loss(model, batch))
    found: str = run.fingerprint()
    return found


def spawned(rank: int, port: int, folder: Path) -> None:
    """Do what a script does under mp.spawn: open the group, and say which rank this is."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    run = lockstep.join(seed=0)
    (folder / str(rank)).write_text(f"{run.rank} {run.size} {train(run)}", encoding="utf-8")
    run.close()
    dist.destroy_process_group()


def refused(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    texts = []
    for ask in (find_rank_in_open_group, lambda: open_world(make_single_process_rendezvous(), torch.device("cpu"))):
        try:
            ask()
        except UsageError as error:
            texts.append(str(error))
    (folder / str(rank)).write_text("\n".join(texts), encoding="utf-8")


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_ranks_that_a_script_started_itself_train_one_model(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mp.start_processes(spawned, (port, tmp_path), nprocs=2, start_method="fork")  # type: ignore[no-untyped-call]
    with joined() as run:
        expected = train(run)
    assert [(tmp_path / each).read_text() for each in "01"] == [f"{rank} 2 {expected}" for rank in (0, 1)]


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_a_group_that_met_by_a_file_is_refused_and_never_ignored(tmp_path: Path) -> None:
    mp.start_processes(refused, (tmp_path,), nprocs=2, start_method="fork")  # type: ignore[no-untyped-call]
    store, several = (tmp_path / "1").read_text().splitlines()
    assert "this process is rank 1 of 2 in an open process group that uses a FileStore" in store
    assert "this process is rank 1 of 2 in the open process group, expected rank 0 of 1" in several


def test_without_a_group_there_is_no_rank() -> None:
    assert find_rank_in_open_group() is None
