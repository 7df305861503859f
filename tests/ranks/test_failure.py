"""What is said of a rank that failed, and by whom; tests/commands lets ranks fail."""

import errno
import re
from dataclasses import replace

import pytest

from lockstep.comm.peer_errors import PeerLostError
from lockstep.common.rank import RankInfo
from lockstep.errors import (
    EXIT_PREFLIGHT,
    ConfigError,
    CorruptionError,
    DataError,
    HostError,
    PreflightError,
    TrainingError,
    UsageError,
    UserCodeError,
)
from lockstep.ranks.external import _format_failure_lines
from lockstep.ranks.failure import Failure, PeerFailedError, make_failure, parse_failure_json
from lockstep.ranks.rank_log import RankLog

OWN = RankInfo(1, 4, 1, 2, "slurm")
FAILURE = Failure(1, 4, "a", "Traceback (most recent call last):\n  in x\nValueError: no", log="logs/rank-1.log")


def test_a_failure_tells_who_what_and_where_to_read_on() -> None:
    assert FAILURE.message == (
        "[rank 1 of 4, a] Traceback (most recent call last):\n  in x\nValueError: no\n  its log: logs/rank-1.log"
    )
    assert FAILURE.summary == "[rank 1 of 4, a] ValueError: no"
    assert replace(FAILURE, text="error: a\nb", log="").summary == "[rank 1 of 4, a] error: a"
    assert parse_failure_json(FAILURE.to_json()) == FAILURE


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("/gloo/device.cc: Too many open files")]
)
def test_a_limit_on_open_files_is_told_as_such(error: Exception) -> None:
    lost = PeerLostError("lost another rank")
    lost.__cause__ = error
    for each in (error, lost):
        failure = make_failure(each, OWN, RankLog(OWN))
        assert failure.text.startswith(
            "error: Too many open files: this process has reached its limit on open files (ulimit -n); the"
        )
        assert (failure.exit_code, failure.secondary) == (EXIT_PREFLIGHT, False)


@pytest.mark.parametrize(
    ("error", "text", "code", "cause"),
    [
        (UsageError("no"), "error: no", 2, "usage"),
        (ConfigError(["a", "b"]), "error: 2 problems\na\nb", 2, "usage"),
        (UserCodeError("no"), "error: no", 2, "code"),
        (ValueError("no"), "ValueError: no", 1, "code"),
        (MemoryError(), "MemoryError", 1, "host"),
        (TrainingError("loss is nan"), "error: loss is nan", 1, "code"),
        (DataError("cut off"), "error: cut off", 1, "data"),
        (HostError("no space"), "error: no space", 1, "host"),
        (CorruptionError("flipped"), "error: flipped", 1, "host"),
        (PreflightError("no port"), "error: no port", EXIT_PREFLIGHT, "host"),
        (PeerLostError("gone"), "error: gone", 1, "transient"),
        (
            PeerFailedError(replace(FAILURE, exit_code=2, cause="data")),
            f"error: stopped because another rank failed: {re.escape(FAILURE.summary)}",
            2,
            "data",
        ),
    ],
)
def test_a_failure_says_in_words_and_by_its_code_what_kind_of_cause_it_had(
    error: Exception, text: str, code: int, cause: str
) -> None:
    failure = make_failure(error, OWN, RankLog(OWN))
    assert re.fullmatch(text, failure.text)
    assert (failure.exit_code, failure.cause, failure.rank) == (code, cause, 1)
    assert failure.secondary == isinstance(error, PeerLostError | PeerFailedError)
    assert parse_failure_json(failure.to_json()) == failure


def test_a_cause_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="cause"):
        parse_failure_json(FAILURE.to_json().replace('"code"', '"fate"'))


def test_each_failure_is_told_in_full_once_and_by_each_host_in_a_line() -> None:
    elsewhere = replace(FAILURE, secondary=True)
    on_host = [RankInfo(rank, 4, rank % 2, 2, "slurm") for rank in range(4)]
    assert _format_failure_lines(on_host[1], FAILURE, FAILURE) == [FAILURE.message]
    said = [_format_failure_lines(on_host[rank], elsewhere, FAILURE) for rank in (0, 2, 3)]
    assert said == [
        [f"rank 0 stops because another rank failed: {FAILURE.summary}"],
        [f"rank 2 stops because another rank failed: {FAILURE.summary}"],
        [],
    ]


def test_the_same_failure_of_several_ranks_is_told_once_unless_they_have_terminals_of_their_own() -> None:
    own = replace(FAILURE, rank=2)
    other = replace(own, text="error: another")
    by_slurm, by_hand = RankInfo(2, 4, 0, 2, "slurm"), RankInfo(2, 4, 0, 2, "environment")
    assert _format_failure_lines(by_slurm, own, FAILURE) == []
    assert _format_failure_lines(by_hand, own, FAILURE) == [own.message]
    assert _format_failure_lines(by_slurm, other, FAILURE) == [other.message]


def test_a_loader_process_that_died_is_told_in_a_line_whatever_was_running() -> None:
    failure = make_failure(RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed. "), OWN, RankLog(OWN))
    assert failure.text.startswith("error: loader process 17 was killed by SIGKILL; probably out of memory")
    assert (failure.exit_code, failure.cause, failure.secondary) == (1, "host", False)
