"""Every client opens its ranks with the guards of training, and a stall that ends a run blames the late rank."""

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from benchmarks import naive_ddp
from lockstep import errors
from lockstep.config.load import LoadedConfig, load
from lockstep.config.placement import Placement
from lockstep.config.run import RunConfig
from lockstep.loop.member import Member
from lockstep.loop.settings import JoinSettings
from lockstep.planning import measure
from lockstep.ranks.failure import Failure
from lockstep.ranks.stall import ThreadState, find_late_ranks
from lockstep.ranks.status import RankStatus
from lockstep.replay import run as replay
from lockstep.run import evaluation, session
from lockstep.run.training import run_rank
from lockstep.runs.worker_context import WORKER_CONTEXT, WorkerContext
from lockstep.setup.resolved import resolve_config
from lockstep.verification import traced_run


class MetError(Exception):
    """A client has come to the comparison with the other ranks."""


class Ranks:
    """A rendezvous of two ranks, which ends where ranks compare."""

    info = SimpleNamespace(rank=0, size=2, local_rank=0, local_size=2, launcher="test")
    hosts = ("a", "a")
    rank_log = SimpleNamespace(host="a", log=None, write=None)
    timing = None
    store = object()
    status: Any = None

    def __init__(self, watched: list[str]) -> None:
        self.watched = watched

    def compare(self, facts: Mapping[str, Any]) -> NoReturn:
        assert self.watched == ["watched"]
        raise MetError(facts)


def _join(loaded: LoadedConfig, folder: Path, ranks: Any) -> object:
    token = WORKER_CONTEXT.set(WorkerContext(ranks))
    try:
        return Member.join(
            lambda: JoinSettings(seed=0, precision="fp32", threads=1, placement=Placement(), run=RunConfig())
        )
    finally:
        WORKER_CONTEXT.reset(token)


def _replay(loaded: LoadedConfig, folder: Path, ranks: Any) -> object:
    opened = replay.RunToReplay(loaded, None, 0, 1, None, {})
    return replay._run_rank(replay.ReplayRequest(folder, 1, 1), print, (opened, None), ranks)  # type: ignore[arg-type]


def _traced(loaded: LoadedConfig, folder: Path) -> traced_run.TraceJob:
    return traced_run.TraceJob(resolve_config(loaded, 2), (0,), 1, folder)


CLIENTS: dict[str, Callable[[LoadedConfig, Path, Any], object]] = {
    "training": lambda loaded, _, ranks: run_rank(resolve_config(loaded, 2), None, None, None, ranks),
    "evaluation": lambda loaded, _, ranks: evaluation._evaluate_on_rank(loaded, None, print, None, ranks),
    "replay": _replay,
    "the naive DDP of a benchmark": lambda loaded, folder, ranks: naive_ddp._on_rank(
        resolve_config(loaded, 2), folder, SimpleNamespace(), None, ranks
    ),
    "verification": lambda loaded, folder, ranks: traced_run.run_case(_traced(loaded, folder), None, ranks),
    "the probe of a verification": lambda loaded, folder, ranks: traced_run.probe_case(
        _traced(loaded, folder), None, ranks
    ),
    "planning": lambda loaded, folder, ranks: measure.measure_rank(resolve_config(loaded, 2), 1e9, folder, None, ranks),
    "planning of a save": lambda loaded, folder, ranks: measure.measure_save(
        resolve_config(loaded, 2), folder, None, ranks
    ),
    "a loop of the user's own": _join,
}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the detector of stalls said when it was entered."""
    seen: list[str] = []

    @contextmanager
    def detector(*_args: object, **_options: object) -> Any:
        seen.append("watched")
        yield

    monkeypatch.setattr(session, "StallDetector", detector)
    return seen


@pytest.mark.parametrize("client", CLIENTS)
def test_each_client_is_watched_and_compares_before_it_opens_anything(
    client: str, watched: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fixed: list[int] = []
    monkeypatch.setattr(session, "select_deterministic_kernels", lambda threads, *_: fixed.append(threads))
    loaded = load("digits", ["recipe.threads=1", "placement.processes=2", "placement.strategy=zero1"])
    with pytest.raises(MetError) as found:
        CLIENTS[client](loaded, tmp_path, Ranks(watched))
    [facts] = found.value.args
    assert fixed == [1]
    assert {"versions", "versions of the libraries, CPU or threads", "placement.strategy"} <= facts.keys()
    if client != "a loop of the user's own":
        assert facts["recipe"]["data"]["name"] == "digits"
        assert facts["placement.strategy"]["name"] == "zero1"
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("client", CLIENTS)
def test_a_variable_that_changes_bits_on_a_card_is_refused_by_each(
    client: str, watched: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(session, "choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(session, "select_deterministic_kernels", lambda *_: None)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    loaded = load("digits", ["placement.processes=2", "placement.strategy=zero1"])
    with pytest.raises(errors.UsageError, match="NVIDIA_TF32_OVERRIDE"):
        CLIENTS[client](loaded, tmp_path, Ranks(watched))
    assert watched == []


def _at(step: int, waits: bool | None) -> tuple[str, ThreadState]:
    return "host", ThreadState(RankStatus("training", step), ("lockstep/x.py:1 f",), waits)


def test_the_late_ranks_are_silent_or_compute_or_are_behind() -> None:
    assert find_late_ranks({0: _at(3, False), 1: _at(3, True), 2: _at(3, True)}, 3) == [0]
    assert find_late_ranks({0: _at(3, True), 1: _at(3, True)}, 3) == [2]
    assert find_late_ranks({0: _at(3, None), 1: _at(2, None)}, 2) == [1]
    assert find_late_ranks({0: _at(3, True), 1: _at(3, True)}, 2) == []


def test_the_failure_names_the_late_rank_and_not_the_one_that_reports_it() -> None:
    ended: list[Failure] = []
    log = SimpleNamespace(host="b", log=None, write=None)
    rendezvous: Any = SimpleNamespace(
        info=SimpleNamespace(rank=1, size=2),
        rank_log=log,
        hosts=("a", "b"),
        timing=None,
        end=ended.append,
        store=None,
    )
    detector = session._make_stall_detector(rendezvous, Placement(on_stall="end"), torch.device("cpu"))
    detector.late_ranks = [0]
    detector.on_report("stalled: rank 1 has waited 2 s for other ranks\n  rank 0 (a) is late: in step 8")
    [failure] = ended
    assert (failure.rank, failure.host) == (0, "a")
    assert failure.first_line == "stalled: rank 1 has waited 2 s for rank 0"
