"""The file of a run's digests: what was written is read, and a resumed run cuts off what it does again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from lockstep.comm.world import World
from lockstep.common.rank import RankInfo
from lockstep.errors import UsageError
from lockstep.run.rank import Rank
from lockstep.runs import digest_file
from lockstep.training.digests import Digest

INFO = RankInfo(0, 1, 0, 1, "test")
ALONE = World(INFO, torch.device("cpu"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / digest_file.DIGESTS
    digest_file.truncate(path, 0)
    digest_file.append(path, [Digest(step, 2**64 - step) for step in range(1, 11)])
    digest_file.append(path, [Digest(10, 3, is_weights=True), Digest(11, 4)])
    return path


def test_a_file_is_read_as_it_was_written(path: Path) -> None:
    assert digest_file.read(path)[9:] == [Digest(10, 2**64 - 10), Digest(10, 3, is_weights=True), Digest(11, 4)]
    assert path.stat().st_size == 16 * 13


def test_a_resumed_run_goes_on_where_it_resumes(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"torn")
    digest_file.truncate(path, 10, pytest.fail)
    digest_file.append(path, [Digest(11, 5)])
    assert digest_file.read(path)[9:] == [Digest(10, 2**64 - 10), Digest(10, 3, is_weights=True), Digest(11, 5)]


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"", "not a digest file"), (b"x" * 99, "not a digest file"), (b"lockstep" + b"\2" + bytes(7), "newer")],
)
def test_another_file_is_told_and_begun_anew(path: Path, content: bytes, problem: str) -> None:
    path.write_bytes(content)
    with pytest.raises(UsageError, match=problem):
        digest_file.read(path)
    warnings: list[str] = []
    digest_file.truncate(path, 10, warnings.append)
    assert [problem in each for each in warnings] == [True]
    assert digest_file.read(path) == []


@pytest.mark.parametrize(("exactness", "every"), [("bits", "off"), ("close", "auto"), ("bits", 3)])
def test_a_run_that_resumes_cuts_off_what_it_does_again(
    path: Path, exactness: str, every: Literal["auto", "off"]
) -> None:
    rendezvous: Any = SimpleNamespace(rank_log=SimpleNamespace(write_to_log=str), info=INFO)
    rank = Rank(rendezvous, ALONE, path.parent, {}, {})
    rank.progress.step = 4
    rank.start_digests(SimpleNamespace(gradients=dict), exactness, every)  # type: ignore[arg-type]
    assert [each.step for each in digest_file.read(path)] == [1, 2, 3, 4]
    assert (rank.digests is not None) == (every == 3)
