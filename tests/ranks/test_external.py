"""The last words of a rank that another launcher started: said once, and never in the way of its end."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist
from waiting import QUICK

from lockstep.comm.peer_errors import PeerLostError
from lockstep.common.rank import RankInfo
from lockstep.ranks import external
from lockstep.ranks.failure import Failure
from lockstep.ranks.rendezvous import Rendezvous

LOST = Failure(0, 4, "a", "error: rank 0, which hosts the rendezvous store, has not answered")


class Ended(BaseException):
    """Stands for the end of a process."""


@pytest.fixture(autouse=True)
def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> NoReturn:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)


def rendezvous(rank: int, launcher: str = "slurm") -> Rendezvous:
    """Return a rank of two hosts with two ranks each; its store is gone."""
    met = Rendezvous(RankInfo(rank, 4, rank % 2, 2, launcher), 1.0, external._report_and_exit, b"", QUICK)
    met.hosts = (*[met.rank_log.host] * 2, "b", "b") if rank < 2 else ("a", "a", *[met.rank_log.host] * 2)
    return met


def test_one_rank_of_each_host_says_that_rank_0_is_gone() -> None:
    said = {rank: external._format_failure_lines_without_store(rendezvous(rank), LOST) for rank in (1, 2, 3)}
    assert said == {1: [LOST.message], 2: [LOST.message], 3: []}
    assert all(
        external._format_failure_lines_without_store(rendezvous(rank, "environment"), LOST) for rank in (1, 2, 3)
    )


def test_a_cause_of_its_own_is_said_by_any_rank() -> None:
    own = Failure(3, 4, "b", "error: disk full")
    assert external._format_failure_lines_without_store(rendezvous(3), own) == [own.message]
    assert external._format_failure_lines_without_store(rendezvous(3), replace(own, secondary=True)) == []


def test_a_rank_ends_though_there_is_no_terminal_and_no_room_for_its_log(tmp_path: Path) -> None:
    ending = rendezvous(1)
    os.close(ending.rank_log._terminal)
    ending.rank_log.log_path = tmp_path  # a folder cannot be written
    with pytest.raises(Ended, match="1"):
        external._report_and_exit(ending, LOST)


def test_a_rank_ends_whose_last_words_take_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = rendezvous(1)
    ending.timing = replace(QUICK, end_timeout_s=0.2)
    monkeypatch.setattr(type(ending.rank_log), "write", lambda *_: time.sleep(3))  # a terminal that was stopped
    began = time.monotonic()
    with pytest.raises(Ended, match="1"):
        external._report_and_exit(ending, LOST)
    assert time.monotonic() - began < 2


def test_a_lost_exchange_is_told_where_no_rank_knows_why(capfd: pytest.CaptureFixture[str]) -> None:
    """As when the link between two other hosts is cut: all ranks live, and none has failed by itself."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def one(rank: int) -> None:
        info = RankInfo(rank, 2, rank, 2, "slurm", "127.0.0.1", store.port, hosted=True)
        with pytest.raises(Ended, match="1"), external.join_job(info, "env://", 20.0, 30.0, QUICK):
            raise PeerLostError("lost another rank during a collective (timed out)")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2)))
    assert "] error: lost another rank during a collective (timed out)" in capfd.readouterr().err
