"""What is believed of the values at a store that anybody may reach."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
from waiting import QUICK, until

from lockstep.common.rank import RankInfo
from lockstep.ranks import job_store
from lockstep.ranks.failure import Failure
from lockstep.ranks.heartbeat import Heartbeat
from lockstep.ranks.job_store import MAX_VALUE_BYTES, JobStore, UntrustedError, parse_fields, parse_int, parse_text
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.stall import StallDetector
from lockstep.ranks.status import RankStatus

SECRET = b"of this job, and nobody else's"


@pytest.fixture
def raw() -> Any:
    return dist.HashStore()


def as_is(value: Any) -> Any:
    return value


@pytest.mark.parametrize("secret", [SECRET, b""], ids=["signed", "unsigned"])
def test_values_come_back_as_they_were_set(raw: Any, secret: bytes) -> None:
    store = JobStore(raw, secret).with_prefix("start")
    for value in ({"a": [1, 2.5, None, True]}, "Grüße \udcff \x1b", 7, ""):
        store.set("key", value)
        assert store.read("key", as_is) == value
        assert store.read_all(["key", "key"], as_is) == [value, value]
    assert store.read_all([], as_is) == []


def refused(store: JobStore, key: str = "key") -> str:
    with pytest.raises(UntrustedError) as caught:
        store.read(key, as_is)
    [found] = store.read_all([key], as_is)
    assert str(found) == str(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_what_another_job_or_nobody_signed_is_refused(raw: Any) -> None:
    store = JobStore(raw, SECRET)
    for stranger in (JobStore(raw, b"of another job altogether"), JobStore(raw, b"")):
        stranger.set("key", "go")
        assert "'key' is not signed with the secret of this job; set the same LOCKSTEP_JOB_SECRET on all" in refused(
            store
        )
    store.set("key", "go")
    sealed = raw.get("key").decode()
    wrong = [f"{sealed[:at]}{'0' if sealed[at] != '0' else '1'}{sealed[at + 1 :]}" for at in (0, 8, 63)]
    for value in ("", " ", "-", '"go"', "0" * 64 + ' "go"', "\x1b[2J", *wrong):
        raw.set("key", value)
        assert "is not signed with the secret of this job" in refused(store)


def test_a_rank_without_the_secret_says_that_it_has_none(raw: Any) -> None:
    JobStore(raw, SECRET).set("key", "go")
    assert "'key' is signed, but this rank has no job secret; set the same" in refused(JobStore(raw, b""))


def test_a_signed_value_holds_for_its_key_and_its_start_alone(raw: Any) -> None:
    store = JobStore(raw, SECRET).with_prefix("start")
    store.set("here 1", "go")
    sealed = raw.get("start/here 1").decode()
    for key in ("start/here 2", "later/here 1", "here 1", "start/here 1 "):
        raw.set(key, sealed)
    refused(store, "here 2")
    refused(store, "here 1 ")
    refused(JobStore(raw, SECRET).with_prefix("later"), "here 1")
    refused(JobStore(raw, SECRET), "here 1")
    raw.set("start/here 1", sealed.replace("go", "no"))
    refused(store, "here 1")


@pytest.mark.parametrize(
    "value",
    ["", "go", "{", "[" * 100_000, "1" * 100_000, "\xff", "nan", '"' + "x" * MAX_VALUE_BYTES + '"'],
    ids=["empty", "word", "half", "deep", "number", "bytes", "nan", "long"],
)
def test_without_a_secret_form_and_length_are_checked(raw: Any, value: str) -> None:
    raw.set("key", f"- {value}")
    found = refused(JobStore(raw, b""))
    assert ("bytes long" in found) == (len(value) > MAX_VALUE_BYTES)
    assert "; if another run uses the same rendezvous, choose a different port or file" in found


def test_what_a_caller_cannot_parse_is_refused(raw: Any) -> None:
    store = JobStore(raw, SECRET)
    store.set("key", "-1")
    with pytest.raises(UntrustedError, match="'key' does not have the format of this version"):
        store.read("key", parse_int)


def test_nothing_longer_than_others_read_is_set(raw: Any) -> None:
    store = JobStore(raw, SECRET)
    store.set("key", "x" * (MAX_VALUE_BYTES - 2))
    assert len(store.read("key", parse_text)) == MAX_VALUE_BYTES - 2
    with pytest.raises(ValueError, match="key: 131,073 bytes exceed the limit of 131,072 bytes"):
        store.set("key", "x" * (MAX_VALUE_BYTES - 1))


def test_what_comes_first_stays_unless_a_stranger_wrote_it(raw: Any) -> None:
    store = JobStore(raw, SECRET)
    raw.set("failure", "- 0")
    assert [store.set_once("failure", value, parse_text) for value in ("first", "second")] == ["first", "first"]
    assert store.read("failure", parse_text) == "first"


@pytest.mark.parametrize(
    ("parse", "expected", "values"),
    [
        (
            partial(parse_fields, types={"rank": int, "host": str}),
            "",
            [
                *(None, [], "a", {}, {"rank": 1}, {"rank": 1, "host": "a", "more": 1}, {"rank": 1, "host": None}),
                *({"rank": rank, "host": "a"} for rank in (True, "1", 1.0)),
            ],
        ),
        (partial(parse_int, maximum=3), "an integer from 0 to 3", [-1, True, 1.0, "1", None, 4, 10**30]),
        (parse_text, "text", [1, None, ["a"], "a\0b"]),
    ],
)
def test_what_ranks_read_is_of_the_form_they_expect(parse: Any, expected: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"expected {expected}"):
            parse(value)


def test_the_table_has_all_keys_that_ranks_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks do all that is done at a store; what they write, and nothing else, is in the table."""
    written: set[str] = set()
    for name in ("set", "add", "set_once"):
        method = getattr(JobStore, name)

        def noting(self: JobStore, key: str, *rest: Any, method: Any = method) -> Any:
            written.add(key)
            return method(self, key, *rest)

        monkeypatch.setattr(JobStore, name, noting)

    def end(_: Rendezvous, _failure: Failure) -> NoReturn:
        raise AssertionError

    reported = threading.Event()

    def one(rank: int) -> None:
        rendezvous = Rendezvous(RankInfo(rank, 2, rank, 2, "test"), 20.0, end, SECRET, QUICK)
        rendezvous.join(f"file://{tmp_path}/meet")
        rendezvous.compare({})
        rendezvous.broadcast_text("")
        rendezvous.gather({})
        rendezvous.get_status = lambda: RankStatus("training")  # where a device may wait for the other rank
        stall = StallDetector(rendezvous, 0.2, lambda _: reported.set(), waits_on_device=True)
        with Heartbeat(rendezvous, 30.0), stall:
            assert reported.wait(60)
            until(lambda: stall._next_query > 0)
        rendezvous.report_failure(Failure(rank, 2, "a", "error: disk full"))
        rendezvous.leave()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2)))
    assert job_store.__doc__
    rows = re.findall(r"^\| (`.*?`) \|", job_store.__doc__, re.MULTILINE)
    keys = [key for row in rows for key in re.findall("`(.*?)`", row) if key != "group ..."]
    patterns = {key: re.compile(re.sub(r"\b[NR]\b", r"\\d+", key)) for key in keys}
    assert [key for key in written if not any(each.fullmatch(key) for each in patterns.values())] == []
    assert [key for key, each in patterns.items() if not any(each.fullmatch(one) for one in written)] == []
