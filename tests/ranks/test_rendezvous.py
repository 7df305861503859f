"""Ranks that meet: here each is a thread, with a connection of its own to a store of torch."""

import os
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
from waiting import QUICK, free_port, until

from lockstep.comm.peer_errors import PeerLostError
from lockstep.common.rank import RankInfo
from lockstep.errors import LockstepError, TrainingError, UsageError
from lockstep.ranks import rendezvous as rendezvous_module
from lockstep.ranks.failure import Failure, PeerFailedError, RanksDifferError, make_failure
from lockstep.ranks.heartbeat import Heartbeat
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.status import RankStatus
from lockstep.ranks.timing import Timing

SIZE = 3
SECRET = b"of this job, and nobody else's"


class Ended(BaseException):
    """Stands for the end of a process."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


def end(_: Rendezvous, failure: Failure) -> NoReturn:
    raise Ended(failure)


@pytest.fixture(params=["tcp", pytest.param("file", marks=pytest.mark.slow("a store as the others")), "agent"])
def infos(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return the ranks of a start and their rendezvous: rank 0 listens, they share a file, or another listens."""
    hosted = request.param == "agent"
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if hosted else None
    port = store.port if store else free_port()
    infos = [RankInfo(rank, SIZE, rank, SIZE, "torchrun", "127.0.0.1", port, hosted=hosted) for rank in range(SIZE)]
    yield infos, f"file://{tmp_path}/meet" if request.param == "file" else "env://"
    del store


def each(infos: Any, work: Callable[[Rendezvous], Any], timeout_s: float = 20.0, timing: Timing = QUICK) -> list[Any]:
    """Do `work` in each rank; return by rank what it returned or raised."""

    def one(info: RankInfo) -> Any:
        rendezvous = Rendezvous(info, timeout_s, end, SECRET, timing)
        try:
            rendezvous.join(infos[1])
            result = work(rendezvous)
        except LockstepError as error:
            rendezvous.report_failure(make_failure(error, info, rendezvous.rank_log))
            result = error
        rendezvous.leave()
        return result

    with ThreadPoolExecutor(len(infos[0])) as pool:
        return list(pool.map(one, infos[0]))


def spoken(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines that ranks said: torch says some too, late ones of an earlier test among them."""
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("[rank ")]


def test_ranks_with_the_same_facts_go_on_and_hear_rank_0(infos: Any) -> None:
    def work(rendezvous: Rendezvous) -> str:
        rendezvous.compare({"recipe": {"lr": 0.1}, "torch": "2"})
        rendezvous.compare({"samples": 5})
        return rendezvous.broadcast_text("folder" if rendezvous.info.rank == 0 else "") + rendezvous.broadcast_text(
            "!" * (rendezvous.info.rank == 0)
        )

    assert each(infos, work) == ["folder!"] * SIZE


def test_all_ranks_hear_who_differs_and_in_what(infos: Any) -> None:
    def work(rendezvous: Rendezvous) -> None:
        rendezvous.compare({"recipe": {"lr": 0.1 + (rendezvous.info.rank == 1), "seed": 0}, "torch": "2"})

    errors = each(infos, work)
    assert {type(error) for error in errors} == {RanksDifferError}
    host = socket.gethostname()
    told = (
        f"recipe: rank 1 ({host}) differs from rank 0 ({host}): lr: 1.1, not 0.1; start all ranks with the same value"
    )
    assert {str(error) for error in errors} == {told}


def test_rank_0_gathers_what_each_gives(infos: Any) -> None:
    def work(rendezvous: Rendezvous) -> list[Any]:
        return [rendezvous.gather({"rank": rendezvous.info.rank}), rendezvous.gather({"again": True})]

    first, *others = each(infos, work)
    assert first == [[{"rank": rank} for rank in range(SIZE)], [{"again": True}] * SIZE]
    assert others == [[[], []]] * (SIZE - 1)


def test_who_does_not_come_to_a_gathering_is_named(infos: Any) -> None:
    def work(rendezvous: Rendezvous) -> Any:
        return None if rendezvous.info.rank == 2 else rendezvous.gather({})

    first, *_ = each(infos, work, timeout_s=1.0)
    assert str(first).startswith("timed out after 1 s waiting for rank 2")


def test_a_rank_that_fails_ends_those_that_wait_for_it(infos: Any) -> None:
    def work(rendezvous: Rendezvous) -> None:
        if rendezvous.info.rank == 2:
            raise UsageError("no such file")
        rendezvous.compare({})

    *others, failed = each(infos, work)
    assert str(failed) == "no such file"
    for error in others:
        assert isinstance(error, PeerFailedError)
        assert error.exit_code == 2
        assert "[rank 2 of 3, " in str(error)
        assert "error: no such file" in str(error)


@pytest.mark.parametrize("infos", ["file", "agent"], indirect=True)  # where rank 0 listens a store is new at each start
def test_what_an_earlier_start_left_is_not_taken_for_this_one(infos: Any) -> None:
    """Also where one of that start never came, and where it was larger: nobody may begin with those that are gone."""
    meetings = [Rendezvous(replace(info, size=4), 0.6, end, SECRET, QUICK) for info in infos[0]]
    with ThreadPoolExecutor(SIZE) as pool:
        before = [pool.submit(rendezvous.join, infos[1]) for rendezvous in meetings]
    assert all(isinstance(each.exception(), TrainingError) for each in before)
    late = ([*infos[0][1:], infos[0][0]], infos[1])  # rank 0 comes last

    def work(rendezvous: Rendezvous) -> str:
        return rendezvous.broadcast_text("new" if rendezvous.info.rank == 0 else "")

    assert each(late, work) == ["new"] * SIZE


@pytest.mark.parametrize("infos", ["file", "agent"], indirect=True)
@pytest.mark.parametrize("earlier", ["of fewer ranks", "failed"])
def test_what_was_over_before_a_rank_came_is_not_its_start(infos: Any, earlier: str) -> None:
    """The rank that is new comes before the new rank 0, and finds nothing but what was left."""
    timeout_s = 0.6 if earlier == "failed" else 20.0
    size = SIZE if earlier == "failed" else SIZE - 1
    first = each(([replace(info, size=size) for info in infos[0][:-1]], infos[1]), lambda _: None, timeout_s)
    assert any(first) == (earlier == "failed")

    def work(info: RankInfo) -> str:
        time.sleep(0.0 if info.rank == SIZE - 1 else 0.5)
        rendezvous = Rendezvous(info, 20.0, end, SECRET, QUICK)
        rendezvous.join(infos[1])
        return rendezvous.broadcast_text("new" if info.rank == 0 else "")

    with ThreadPoolExecutor(SIZE) as pool:
        assert list(pool.map(work, infos[0])) == ["new"] * SIZE


@pytest.mark.parametrize("infos", ["agent"], indirect=True)
def test_a_start_that_was_over_is_believed_in_the_end(infos: Any) -> None:
    assert each(([replace(info, size=2) for info in infos[0][:2]], infos[1]), lambda _: None) == [None, None]
    with pytest.raises(UsageError, match=r"rank 0 \(.*\) was started with world size 2, but rank 2 .* with 3"):
        Rendezvous(infos[0][2], 20.0, end, SECRET, replace(QUICK, late_timeout_s=0.5)).join(infos[1])


@pytest.mark.parametrize("infos", ["file", "agent"], indirect=True)
def test_who_comes_to_a_start_that_failed_hears_why_before_its_time_is_up(infos: Any) -> None:
    each(([replace(info, size=4 - info.rank) for info in infos[0][:2]], infos[1]), lambda _: None)
    with pytest.raises(PeerFailedError, match=r"WORLD_SIZE: rank 1 .* with world size 3, but rank 0 .* with 4"):
        Rendezvous(infos[0][2], 1.0, end, SECRET, QUICK).join(infos[1])


def test_ranks_of_another_run_do_not_disturb_one_that_has_begun(infos: Any) -> None:
    """As where two users take the same port: one of them is refused, and the other hears nothing of it."""
    stranger = replace(infos[0][2], rank=3, size=4)
    refused = threading.Event()

    def work(rendezvous: Rendezvous) -> Failure | None:
        if rendezvous.info.rank == 1:
            [error] = each(([stranger], infos[1]), lambda _: None, timing=replace(QUICK, late_timeout_s=0.5))
            assert isinstance(error, UsageError)
            assert re.search(
                r"world size 3, but .* with 4; .* if another run uses the same rendezvous, choose ", str(error)
            )
            refused.set()
        assert refused.wait(60)
        rendezvous.compare({})
        return rendezvous.get_first_failure()

    assert each(infos, work) == [None] * SIZE


def test_who_listens_and_does_not_answer_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        told = f"rank 0 at 127.0.0.1:{port} (a process listens there, but does not answer)"
        with pytest.raises(TrainingError) as caught:
            Rendezvous(RankInfo(1, 2, 1, 2, "environment", "127.0.0.1", port), 0.6, end, b"", QUICK).join("env://")
    assert str(caught.value) == f"timed out after 1 s waiting for {told}"
    assert f"still waiting for {told} after 0 s" in capfd.readouterr().err


def test_a_store_that_goes_while_ranks_meet_is_told_in_a_line() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    name = "ab" * 16
    store.set(rendezvous_module._START, f'- "{name}"')  # as rank 0 does
    info = RankInfo(1, 2, 1, 2, "torchrun", "127.0.0.1", store.port, hosted=True)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Rendezvous(info, 20.0, end, b"", QUICK).join, "env://")
        store.wait([f"{name}/here 1"], timedelta(seconds=10))
        del store
        with pytest.raises(PeerLostError, match="lost torchrun's agent, which hosts the rendezvous store "):
            joining.result(10)


def test_a_rank_that_is_started_before_the_others_have_ended_joins_their_next_start() -> None:
    port, name = free_port(), "ab" * 16
    before = [dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)]
    before[0].set(rendezvous_module._START, f'- "{name}"')
    before[0].add(f"{name}/came 1", 1)
    infos = [RankInfo(rank, 2, rank, 2, "node", "127.0.0.1", port, restarted_separately=True) for rank in range(2)]
    first, second = (Rendezvous(info, 20.0, end, b"", QUICK) for info in infos)
    with ThreadPoolExecutor(2) as pool:
        joining = pool.submit(second.join, "env://")
        until(lambda: before[0].add(f"{name}/came 1", 0) == 2)
        before.clear()
        pool.submit(first.join, "env://").result(20)
        joining.result(20)
    assert second.hosts == first.hosts


@pytest.mark.parametrize("infos", ["tcp"], indirect=True)
def test_a_second_process_of_a_rank_is_refused_at_once(infos: Any) -> None:
    def work(rendezvous: Rendezvous) -> None:
        if rendezvous.info.rank == 1:
            with pytest.raises(UsageError, match="another process has already joined as rank 1; if another run "):
                Rendezvous(rendezvous.info, 20.0, end, SECRET, QUICK).join(infos[1])
        rendezvous.compare({})

    assert each(infos, work) == [None] * SIZE


def test_who_listens_and_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        info = RankInfo(1, 2, 1, 2, "environment", "127.0.0.1", server.getsockname()[1])
        with pytest.raises(
            UsageError,
            match=r"timed out after 0 s waiting for rank 0 at .*; if another run uses the same rendezvous, ",
        ):
            Rendezvous(info, 20.0, end, b"", replace(QUICK, late_timeout_s=0.1)).join("env://")


@pytest.mark.parametrize("infos", ["file", "agent"], indirect=True)
def test_a_missing_rank_0_is_named_by_one_of_each_host(infos: Any, capfd: pytest.CaptureFixture[str]) -> None:
    for error in each((infos[0][1:], infos[1]), lambda _: None, timeout_s=0.6):
        assert str(error) == "timed out after 1 s waiting for rank 0"
    said = spoken(capfd)
    assert said[0] == f"[rank 1 of 3, {socket.gethostname()}] still waiting for rank 0 after 0 s"
    assert not any("rank 2 of 3" in line for line in said)


@pytest.mark.parametrize("infos", ["file"], indirect=True)
def test_a_rank_0_that_is_late_is_named(infos: Any, capfd: pytest.CaptureFixture[str]) -> None:

    def work(rendezvous: Rendezvous) -> None:
        if rendezvous.info.rank == 0:
            time.sleep(0.5)
        rendezvous.compare({})

    assert each(infos, work) == [None] * SIZE
    host = socket.gethostname()
    assert f"[rank 1 of 3, {host}] still waiting for rank 0 ({host}) after 0 s" in capfd.readouterr().err.splitlines()


@pytest.mark.parametrize("infos", ["tcp"], indirect=True)
def test_a_missing_rank_is_named(infos: Any, capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    [first, second] = each((infos[0][:2], infos[1]), lambda _: None, timeout_s=0.6)
    assert time.monotonic() - began < 20
    assert str(first) == "timed out after 1 s waiting for rank 2"
    assert isinstance(second, PeerFailedError)
    said = spoken(capfd)
    assert said[0] == f"[rank 0 of 3, {socket.gethostname()}] still waiting for rank 2 after 0 s"


def test_another_number_of_ranks_is_told_to_all(infos: Any) -> None:
    ranks = [*infos[0][:2], replace(infos[0][2], size=4)]
    # A thread that comes after the failure waits for a new start.
    errors = each((ranks, infos[1]), lambda _: None, timing=replace(QUICK, late_timeout_s=0.5))
    assert isinstance(errors[0], UsageError)
    assert "rank 2" in str(errors[0])
    assert "started with world size 4" in str(errors[0])
    assert all(isinstance(error, PeerFailedError | UsageError) for error in errors)


def test_a_taken_port_is_told_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        info = RankInfo(0, 2, 0, 2, "environment", "127.0.0.1", port)
        for rendezvous in (f"tcp://127.0.0.1:{port}", "env://"):
            with pytest.raises(UsageError, match=f"{port}: rank 0 cannot listen there: Address already in use by pid "):
                Rendezvous(info, 1.0, end).join(rendezvous)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    info = replace(info, port=store.port)
    with pytest.raises(UsageError, match="remove init_process_group, "):
        Rendezvous(info, 1.0, end).join("env://")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("info", "rendezvous", "problem"),
    [
        (RankInfo(1, 2, 0, 1, "environment"), "env://", "MASTER_ADDR and MASTER_PORT are not both set"),
        (RankInfo(1, 2, 0, 1, "environment", "localhost"), "env://", "MASTER_ADDR and MASTER_PORT are not both set"),
        (RankInfo(0, 2, 0, 1, "environment"), "tcp://localhost:99999", "with a port from 1 to 65535"),
        (RankInfo(0, 2, 0, 1, "environment"), "tcp://192.0.2.1:29500", "rank 0 cannot listen there: Cannot assign"),
        (RankInfo(1, 2, 0, 1, "environment"), "file:///no/such/folder", "file:///no/such/folder: No such file or dir"),
    ],
)
def test_addresses_that_cannot_work_are_told_before_anything_starts(
    info: RankInfo, rendezvous: str, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        Rendezvous(info, 1.0, end).join(rendezvous)


def test_a_file_to_meet_in_is_made_for_this_user_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    infos = [RankInfo(rank, 2, rank, 2, "environment") for rank in range(2)]
    for name, problem in (("fifo", "not a file"), (".", "Is a directory")):
        with pytest.raises(UsageError, match=f"rendezvous file://.*: {problem}; use "):
            Rendezvous(infos[0], 1.0, end).join(f"file://{tmp_path}/{name}")

    def work(rendezvous: Rendezvous) -> int:
        rendezvous.compare({})
        mode = (tmp_path / "meet").stat().st_mode & 0o777
        rendezvous.compare({})  # torch removes the file with the last that leaves
        return mode

    assert each((infos, f"file://{tmp_path}/meet"), work) == [0o600, 0o600]


def test_a_name_that_stands_for_no_address_is_told_in_seconds() -> None:
    timing = replace(QUICK, unknown_host_timeout_s=0.3)
    for rank in range(2):
        with pytest.raises(
            UsageError, match=r"cannot resolve the host no.such.host.invalid \(.*placement.rendezvous=tcp"
        ):
            Rendezvous(RankInfo(rank, 2, 0, 1, "environment"), 600.0, end, b"", timing).join(
                "tcp://no.such.host.invalid:29500"
            )


def test_one_process_waits_for_nobody() -> None:
    rendezvous = Rendezvous(RankInfo(0, 1, 0, 1, "torchrun"), 1.0, end)
    rendezvous.join("env://")
    rendezvous.compare({"recipe": 1})
    assert (rendezvous.broadcast_text("folder"), rendezvous.get_first_failure()) == ("folder", None)
    assert rendezvous.hosts == (socket.gethostname(),)


def beating(infos: Any, work: Callable[[Rendezvous, Heartbeat], Any], lost_after_s: float = 30.0) -> list[Any]:
    """Do `work` in each rank with its heartbeat; what ends a rank at once is noted in place of an answer."""
    ends: dict[int, Failure] = {}

    def one(info: RankInfo) -> Any:
        ended = threading.Event()

        def note(rendezvous: Rendezvous, failure: Failure) -> NoReturn:
            ends[info.rank] = failure
            ended.set()
            threading.Event().wait()  # a process would not go on

        rendezvous = Rendezvous(info, 20.0, note, SECRET, QUICK)
        rendezvous.join(infos[1])
        rendezvous.rank_log.log_path = Path(f"run/logs/rank-{info.rank}.log")
        rendezvous.get_status = lambda: RankStatus("training", 5)
        try:
            with Heartbeat(rendezvous, lost_after_s) as heartbeat:
                if answer := work(rendezvous, heartbeat):
                    return ends.get(info.rank, answer)
                assert ended.wait(60)
                raise Ended(ends[info.rank])  # leaves as a process does that is ended: without a word to the others
        except Ended as error:
            return error.failure

    with ThreadPoolExecutor(len(infos[0])) as pool:
        return list(pool.map(one, infos[0]))


def silence(heartbeat: Heartbeat) -> None:
    """Let a rank that was heard once say nothing more, as if it were stopped."""
    until(lambda: heartbeat._poll_count > 0)
    heartbeat._stop_event.set()


@pytest.mark.parametrize("infos", ["tcp"], indirect=True)
def test_ranks_that_live_are_left_alone(infos: Any) -> None:
    def work(_: Rendezvous, heartbeat: Heartbeat) -> str:
        time.sleep(8 * QUICK.beat_s)
        return str(heartbeat.find_cause())

    assert beating(infos, work) == ["None"] * SIZE


@pytest.mark.parametrize("infos", ["tcp"], indirect=True)
@pytest.mark.parametrize(("seen", "words"), [("unknown", "killed, stopped, disconnected or hung"), ("gone", "killed")])
def test_a_rank_of_which_nothing_is_heard_is_given_up(
    infos: Any, monkeypatch: pytest.MonkeyPatch, seen: str, words: str
) -> None:
    def work(rendezvous: Rendezvous, heartbeat: Heartbeat) -> str | None:
        if rendezvous.info.rank == 0:
            return None
        if rendezvous.info.rank == 1:
            silence(heartbeat)
        time.sleep(4 * QUICK.silent_s)
        return "silent" if rendezvous.info.rank == 1 else "waited"

    monkeypatch.setattr("lockstep.ranks.process_state.get_state", lambda _: seen)
    first, silent, _ = beating(infos, work, lost_after_s=0.4 if seen == "unknown" else 30.0)
    assert silent == "silent"
    assert first.rank == 1
    assert first.text.startswith(f"error: no heartbeat for 0 s (last status: in step 6): {words} (it used up to ")
    assert first.log == "run/logs/rank-1.log"


@pytest.mark.parametrize("infos", ["tcp"], indirect=True)
def test_a_rank_that_is_seen_to_run_is_waited_for(infos: Any) -> None:
    """Python's threads may stand still for long: one that holds the interpreter's lock keeps them from running."""

    def work(rendezvous: Rendezvous, heartbeat: Heartbeat) -> str:
        if rendezvous.info.rank == 1:
            silence(heartbeat)
        time.sleep(4 * QUICK.silent_s)
        return "waited"

    assert beating(infos, work, lost_after_s=0.4) == ["waited"] * SIZE


@pytest.mark.parametrize("infos", ["tcp"], indirect=True)
def test_a_failure_elsewhere_ends_who_does_not_notice(infos: Any) -> None:
    def work(rendezvous: Rendezvous, _: Heartbeat) -> str | None:
        if rendezvous.info.rank == 2:
            rendezvous.report_failure(Failure(2, SIZE, "b", "error: disk full"))
            return "failed"
        return None

    *others, failed = beating(infos, work)
    assert failed == "failed"
    assert [(each.rank, each.text, each.secondary) for each in others] == [(2, "error: disk full", True)] * 2
