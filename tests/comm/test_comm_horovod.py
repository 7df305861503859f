"""What Horovod is told of the ranks, and what its sum is given, by a stand-in that adds nothing over ranks."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.comm import horovod
from lockstep.comm.horovod import Horovod
from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.core.tree import LeafBlock
from lockstep.errors import UsageError


class StandIn:
    """Horovod as one rank of one sees it."""

    Compression = SimpleNamespace(none="none", fp16="fp16")
    Sum = "sum"

    def __init__(self, size: int = 1) -> None:
        self.names: list[str] = []
        self.found = 0, size

    def init(self) -> None: ...

    def rank(self) -> int:
        return self.found[0]

    def size(self) -> int:
        return self.found[1]

    def allreduce(self, tensor: torch.Tensor, name: str, op: str, compression: str) -> torch.Tensor:
        assert (op, compression) == ("sum", "fp16")
        self.names.append(name)
        return tensor


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away, and give back, what Horovod reads."""
    for name in [*(name for name in os.environ if name.startswith("HOROVOD_")), "OMPI_COMM_WORLD_RANK"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))


def started(monkeypatch: pytest.MonkeyPatch, stand_in: StandIn) -> Horovod:
    monkeypatch.setattr(horovod, "import_module", lambda _: stand_in)
    os.environ["HOROVOD_RANK"] = "0"
    return Horovod(World(ALONE, torch.device("cpu")))


def test_own_pieces_are_added_and_a_rank_without_any_adds_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn()
    add = started(monkeypatch, stand_in).make_sum("fp16")
    pieces = {LeafBlock(0, 2): torch.tensor([1.0, 2.0]), LeafBlock(2, 1): torch.tensor([10.0, 20.0])}
    assert add(pieces, 3, torch.empty(2)).tolist() == [11.0, 22.0]
    assert add({}, 3, torch.empty(2)).tolist() == [0.0, 0.0]
    assert len(set(stand_in.names)) == 1


def test_ranks_that_horovod_counts_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="reports rank 0 of 2, but this process is rank 0 of 1"):
        started(monkeypatch, StandIn(size=2))


def test_what_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> Any:
        raise ImportError("libmpi.so.40: cannot open shared object file")

    monkeypatch.setattr(horovod, "import_module", missing)
    with pytest.raises(UsageError, match=r"libmpi\.so\.40.*scripts/install-horovod"):
        Horovod(World(ALONE, torch.device("cpu")))


def test_waiting_is_bounded_and_a_launchers_variables_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "5"
    started(monkeypatch, StandIn())
    assert os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "5"
    assert int(os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]) > int(os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"])
    assert "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in os.environ
