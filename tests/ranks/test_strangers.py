"""What somebody can do who reaches the store at which the ranks of a job meet, and writes there whatever they like."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
from waiting import QUICK, free_port, until

from lockstep.common.rank import RankInfo
from lockstep.errors import LockstepError, UsageError
from lockstep.ranks import failure, heartbeat, stall
from lockstep.ranks.failure import Failure, PeerFailedError, RanksDifferError
from lockstep.ranks.heartbeat import Beat, Heartbeat, get_watched_ranks
from lockstep.ranks.job_store import JobStore, UntrustedError
from lockstep.ranks.rendezvous import Rendezvous, describe_differences
from lockstep.ranks.stall import StallDetector

SECRET = b"of this job, and nobody else's"
FORGED = Failure(1, 2, "b", "error: disk full", exit_code=75)


def end(_: Rendezvous, failure: Failure) -> NoReturn:
    raise AssertionError(failure.message)


def started(
    work: Callable[[Rendezvous], Any], secrets: tuple[bytes, bytes] = (SECRET, SECRET), timeout_s: float = 20.0
) -> list[Any]:
    """Do `work` in two ranks that meet by a port, the first of them where it listens; return what they return."""
    port = free_port()

    def one(rank: int) -> Any:
        info = RankInfo(rank, 2, rank, 2, "environment", "127.0.0.1", port)
        rendezvous = Rendezvous(info, timeout_s, end, secrets[rank], QUICK)
        try:
            rendezvous.join("env://")
            result = work(rendezvous)
        except LockstepError as error:
            result = error
        rendezvous.leave()
        return result

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def stranger(rendezvous: Rendezvous) -> Any:
    """Return a connection to the part of the store where the ranks have met, for raw values."""
    return rendezvous.store.unsigned.clone()


def test_a_failure_that_no_rank_signed_ends_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    def work(rendezvous: Rendezvous) -> Failure | None:
        if rendezvous.info.rank == 0:
            stranger(rendezvous).set("failure", f"- {FORGED.to_json()}")
        rendezvous.compare({"recipe": 1})
        rendezvous.broadcast_text("folder")
        return rendezvous.get_first_failure()

    assert started(work) == [None, None]
    said = [line for line in capfd.readouterr().err.splitlines() if "warning: ignored a failure report: " in line]
    assert len(said) == 2  # once each
    assert "rendezvous store: 'failure' is not signed with the secret of this job" in said[0]


def test_a_failure_of_a_rank_is_heard_though_a_stranger_was_first() -> None:
    def work(rendezvous: Rendezvous) -> Failure | None:
        if rendezvous.info.rank == 0:
            stranger(rendezvous).set("failure", f"- {FORGED.to_json()}")
            stranger(rendezvous).add("failures", 7)
            return rendezvous.report_failure(Failure(0, 2, "a", "error: no such file", exit_code=2))
        rendezvous.compare({})  # for which rank 0 does not come
        return None

    own, heard = started(work)
    assert isinstance(heard, PeerFailedError)
    assert (own.text, heard.failure.text, heard.exit_code) == ("error: no such file", "error: no such file", 2)


def test_without_a_secret_a_stranger_ends_a_run_but_neither_well_nor_with_escapes() -> None:
    def work(rendezvous: Rendezvous) -> Any:
        text = "error: \x1b[2J\x1b]0;owned\x07\u202e\rdisk full"
        if rendezvous.info.rank == 0:
            stranger(rendezvous).set("failure", f"- {json.dumps(asdict(FORGED) | {'exit_code': 0})}")
            rendezvous.compare({})
            forged = asdict(FORGED) | {"text": text, "host": "b\n\x1b[1A", "log": "\x9b1A"}
            stranger(rendezvous).set("failure", f"- {json.dumps(forged)}")
        else:
            rendezvous.compare({})
        until(lambda: rendezvous.get_first_failure() is not None)
        return rendezvous.get_first_failure()

    for found in started(work, (b"", b"")):
        assert found.exit_code == 75
        assert found.message == (
            "[rank 1 of 2, b\\n\\x1b[1A] error: \\x1b[2J\\x1b]0;owned\\x07\\u202e\\rdisk full\n  its log: \\x9b1A"
        )
        assert "\x1b" not in found.summary


@pytest.mark.parametrize(("key", "value"), [("here 1", {"size": 2, "host": "b"}), ("begin", {"size": 2, "hosts": []})])
def test_nobody_joins_or_begins_by_what_a_stranger_says(key: str, value: Any) -> None:
    """Both ranks stop: who overwrites what is needed can keep a run from starting, and no more than that."""
    sealed = f"- {json.dumps(value)}"
    port = free_port()
    infos = [RankInfo(rank, 2, rank, 2, "environment", "127.0.0.1", port) for rank in range(2)]
    first, other = (Rendezvous(info, 2.0, end, SECRET, QUICK) for info in infos)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(first.join, "env://")
        until(lambda: first.store is not None and first.store.has("here 0"))
        if key == "begin":  # which rank 0 sets as well, once rank 1 is here: it has given up before
            assert isinstance(joining.exception(), LockstepError)
        stranger(first).set(key, sealed)
        with pytest.raises(UsageError, match=f"rendezvous store: '{key}' is not signed with the secret of this"):
            joining.result() if key == "here 1" else other.join("env://")


@pytest.mark.parametrize(
    "secrets", [(SECRET, b""), (b"", SECRET), (SECRET, b"x" * 16)], ids=["1 none", "0 none", "two"]
)
def test_ranks_with_different_secrets_say_so_at_once(secrets: tuple[bytes, bytes]) -> None:
    missing, error = started(lambda _: None, secrets, timeout_s=0.5)
    assert isinstance(error, UntrustedError)
    assert "'lockstep start' is" in str(error)
    assert "; set the same LOCKSTEP_JOB_SECRET on all ranks, or on none; if another run uses " in str(error)
    assert "rank 1" in str(missing)


def test_a_start_of_a_job_with_another_secret_is_waited_out(tmp_path: Any) -> None:
    """What a killed run left in a file that is used again is not ours, and no reason to give up."""
    place = f"file://{tmp_path}/meet"
    JobStore(dist.FileStore(f"{tmp_path}/meet", 2), b"of the job before this one").set("lockstep start", "ab" * 16)
    infos = [RankInfo(rank, 2, rank, 2, "environment") for rank in range(2)]
    first, other = (Rendezvous(info, 20.0, end, SECRET, QUICK) for info in infos)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(other.join, place)
        threading.Event().wait(0.3)
        first.join(place)
        joining.result(10)
    assert first.hosts == other.hosts


def test_later_starts_and_ranks_that_are_not_there_change_nothing() -> None:
    def work(rendezvous: Rendezvous) -> Failure | None:
        raw = stranger(rendezvous)
        if rendezvous.info.rank == 0:
            for key in ("here -1", "here 2", "beat -1", "beat 2", "compare -1 0", "compare 99 verdict", "tell 99 0"):
                raw.set(key, "- {}")
            base = dist.TCPStore(rendezvous.info.master, rendezvous.info.port, None, False, wait_for_workers=False)  # type: ignore[arg-type]
            base.set("lockstep start", f'- "{"cd" * 16}"')
            base.set(f"{'cd' * 16}/failure", f"- {FORGED.to_json()}")
        rendezvous.compare({"recipe": 1})
        return rendezvous.get_first_failure()

    assert started(work) == [None, None]


def test_what_ranks_compare_and_tell_is_believed_of_ranks_alone() -> None:
    def work(rendezvous: Rendezvous) -> Any:
        if rendezvous.info.rank == 1:
            rendezvous.compare({})
            return rendezvous.broadcast_text()
        raw = stranger(rendezvous)
        rendezvous.compare({})
        raw.set("tell 2 0", '- "/of/a/stranger"')
        raw.wait(["tell 2 0"], timedelta(seconds=5))
        return None

    _, error = started(work)
    assert isinstance(error, UntrustedError)
    assert "'tell 2 0' is not signed" in str(error)


def test_facts_of_ranks_are_shown_without_escapes() -> None:
    facts = {0: {"data": {"a": 1}}, 1: {"data": {"a": "\x1b[2J", "\x1b]0;": 2}}}
    [line] = describe_differences(facts, ["a", "b"])
    assert "a: \\x1b[2J, not 1" in line
    assert "\x1b" not in line

    def work(rendezvous: Rendezvous) -> None:
        rendezvous.compare({"data": ["\x1b"] * (1 + rendezvous.info.rank)})

    for error in started(work):
        assert isinstance(error, RanksDifferError)
        assert "\x1b" not in str(error)


def test_facts_that_are_too_long_to_send_are_compared_by_their_hash() -> None:
    def work(rendezvous: Rendezvous) -> None:
        rendezvous.compare({"classes": ["x" * 100] * 50_000, "samples": 5})
        rendezvous.compare({"classes": ["x" * 100] * 50_000 + ["y"] * rendezvous.info.rank, "samples": 5})

    for error in started(work):
        assert isinstance(error, RanksDifferError)
        assert str(error).startswith("classes: rank 1 (")
        assert len(str(error)) < 300


def each_of(values: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Return a change for each of the values that a field may be given."""
    return [{name: value} for name, each in values.items() for value in each]


GOOD = json.loads(FORGED.to_json())


@pytest.mark.parametrize(
    "wrong",
    [
        *each_of(
            {
                "exit_code": (0, 256, -9, True),
                "rank": (-1, 2),
                "size": (0,),
                "text": (None, ["a"]),
                "host": (1,),
                "time": (float("nan"), 1),
                "secondary": ("yes",),
                "more": (1,),
            }
        ),
        {"rank": 10**30, "size": 10**31},
    ],
    ids=str,
)
def test_what_is_no_failure_is_refused(wrong: dict[str, Any]) -> None:
    assert failure.parse_failure(GOOD) == FORGED
    with pytest.raises(ValueError, match="expected"):
        failure.parse_failure(GOOD | wrong)


def test_a_failure_that_is_too_long_keeps_its_ends() -> None:
    long = Failure(0, 1, "a", "first\n" + "\x1b" * 20_000 + "\nlast")
    assert len(long.text) == 8_000
    assert long.text.startswith("first\n\\x1b")
    assert long.text.endswith("\\x1b\nlast")
    assert " characters omitted ...\n" in long.text
    assert failure.parse_failure_json(long.to_json()) == long


BEAT = asdict(Beat(3, "boot ns host 17 99", 2**20, "in step 5"))


@pytest.mark.parametrize(
    "wrong",
    each_of({"look": (-1, "3", 10**30), "peak": (-1, 1.5), "status": (None,), "left": (1,), "x": (1,)}),
    ids=str,
)
def test_what_is_no_beat_is_refused(wrong: dict[str, Any]) -> None:
    assert heartbeat.parse_beat(BEAT | {"status": "\x1b[2J"}).status == "\\x1b[2J"
    with pytest.raises(ValueError, match="expected"):
        heartbeat.parse_beat(BEAT | wrong)


@pytest.mark.parametrize("size", [1, 2, 65, 66, 5000])
def test_each_rank_is_watched_by_one_other_and_rank_0_by_all(size: int) -> None:
    ranks = [get_watched_ranks(rank, size) for rank in range(size)]
    times = Counter({rank: 1 if rank else size - 1 for rank in range(size)})
    assert Counter(each for own in ranks for each in own) == times
    assert max(map(len, ranks)) <= 65


def test_only_a_later_beat_of_a_rank_is_a_sign_of_life() -> None:
    """A stranger can write none, but can write again what a rank once wrote."""
    watching = Heartbeat(Rendezvous(RankInfo(0, 2, 0, 2, "environment"), 20.0, end), 30.0)
    watching._record_beat(1, Beat(5))
    for found in (Beat(4), Beat(5), None, UntrustedError("beat 1", "is forged")):
        before = watching._polls_since_beat[1]
        watching._record_beat(1, found)
        assert watching._polls_since_beat[1] == before + 1
    watching._record_beat(1, Beat(6))
    assert watching._polls_since_beat[1] == 0
    watching._record_beat(1, Beat(7, left=True))
    watching._record_beat(1, Beat(7, left=True))
    assert watching._polls_since_beat[1] == 0


def test_a_stranger_does_not_end_the_heartbeat() -> None:
    """By the words of all ranks that they have left."""
    ended = threading.Event()

    def note(_: Rendezvous, failure: Failure) -> NoReturn:
        if failure.rank == 1:
            ended.set()
        threading.Event().wait()  # a process would not go on

    def work(rendezvous: Rendezvous) -> bool:
        rendezvous._end = note
        raw = stranger(rendezvous)
        with Heartbeat(rendezvous, 2.0) as beating:  # on a busy machine, rank 0 may be late itself
            if rendezvous.info.rank == 0:
                return ended.wait(60)
            until(lambda: beating._poll_count > 1)
            beating._stop_event.set()
            for _ in range(600):
                raw.set("beat 1", f"- {json.dumps(asdict(Beat(10**6, left=True)))}")
                if ended.wait(0.1):
                    break
            return ended.is_set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.ranks.process_state.get_state", lambda _: "unknown")
        assert started(work) == [True, True]


ANSWER = {
    "host": "b",
    "status": {"phase": "training", "step": 4},
    "stack": ["a.py:1 f"],
    "waits": None,
    "record": "",
}


@pytest.mark.parametrize(
    "wrong",
    each_of(
        {
            "host": (1,),
            "status": ({}, {"phase": "sleeping", "step": 4}, {"phase": "training", "step": -1}),
            "stack": ([], [1], "a"),
            "waits": (1, "no"),
            "record": (None,),
            "more": (1,),
        }
    ),
    ids=str,
)
def test_what_is_no_answer_to_a_stall_is_refused(wrong: dict[str, Any]) -> None:
    host, place = stall.parse_answer(ANSWER | {"host": "\x1b", "stack": ["\x1b:1 f"], "record": "\x1b"})
    assert "\x1b" not in host + place.description + place.record + "".join(place.stack)
    for value in (ANSWER | wrong, [], None):
        with pytest.raises(ValueError, match="expected"):
            stall.parse_answer(value)


def test_a_stranger_does_not_make_ranks_report_where_they_are() -> None:
    def work(rendezvous: Rendezvous) -> list[bool]:
        reports: list[str] = []
        with StallDetector(rendezvous, 0.4, reports.append):
            if rendezvous.info.rank == 0:
                stranger(rendezvous).add("stall 0 asked", 1)
                stranger(rendezvous).set("stall 0 asked", "- 0")
            threading.Event().wait(0.8)
        return [rendezvous.store.has(f"stall 0 answer {rank}") for rank in range(2)] + [bool(reports)]

    assert started(work) == [[False, False, False]] * 2
