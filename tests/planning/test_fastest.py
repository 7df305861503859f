"""The fastest strategy: what is measured with all ranks, who wins, what a run keeps, and what is refused."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lockstep.config.load import LoadedConfig, load, to_yaml
from lockstep.config.placement import Placement, StrategyConfig
from lockstep.device import host
from lockstep.errors import UsageError
from lockstep.planning import fastest
from lockstep.planning import survey as surveying
from lockstep.planning.fastest import select_fastest
from lockstep.planning.measure import Measurements
from lockstep.planning.survey import Machine, PlacementEstimate, get_memory_per_rank, open_for_survey, survey

pytestmark = pytest.mark.usefixtures("here")
MIB = 2**20
WORDS = ["placement.device=cpu", "placement.strategy=fastest", "placement.processes=2"]
Surveyed = Callable[[Sequence[PlacementEstimate]], list[int]]


def row(strategy: str, seconds: float, peak: int) -> PlacementEstimate:
    return PlacementEstimate(strategy, 2, "", Measurements(peak // 2, peak, seconds), seconds=seconds)


@pytest.fixture
def surveyed(monkeypatch: pytest.MonkeyPatch) -> Surveyed:
    """Return a function that sets what a survey finds, and returns the counts of those that are asked for."""

    def surveyed(rows: Sequence[PlacementEstimate]) -> list[int]:
        asked: list[int] = []

        def survey(loaded, ready, strategies, counts, machine, tell):
            asked.extend(counts)
            return list(rows)

        monkeypatch.setattr(fastest, "open_for_survey", lambda _: None)
        monkeypatch.setattr(fastest, "survey", survey)
        return asked

    return surveyed


# With a rank alone and with all of them: the bytes at most, and the seconds of a step; the links that are tried.
@pytest.mark.parametrize(
    ("words", "processes", "link", "free", "links", "seconds"),
    [
        ([], 2, None, 20, [1e9, None], 3.0),
        ([], 2, None, 19, [1e9], 1.0),  # all have no room
        ([], 2, 2e9, 20, [2e9], 1.0),  # another machine
        ([], 4, None, 40, [1e9], 2.0),  # more than are run here, by turns on the cores
        (["placement.device=auto"], 2, None, 20, [1e9], 1.0),  # that are to share the one card
        (["placement.device=auto", "placement.backend=gloo"], 2, None, 20, [1e9, None], 3.0),
        (["recipe.batchnorm=sync"], 2, None, 0, [None], 3.0),
    ],
)
def test_all_ranks_are_measured_where_they_have_room(
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    processes: int,
    link: float | None,
    free: int,
    links: list[float | None],
    seconds: float,
) -> None:
    tried: list[float | None] = []

    def largest(resolved, ready, link):
        tried.append(link)
        return (Measurements(5, 10, 1.0, 7, 2) if link else Measurements(5, 9, 3.0)), ""

    monkeypatch.setattr(surveying, "measure_maxima", largest)
    monkeypatch.setattr(surveying, "MIN_CPU_RANKS", 2)
    monkeypatch.setattr(surveying, "count_usable_cores", lambda: 2)
    monkeypatch.setattr(host, "get_memory_info", lambda: {"free": free, "limit": None})
    loaded = load("digits", ["placement.device=cpu", *words])
    ready = open_for_survey(loaded.replace_values("placement", {"device": "cpu"}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=free))
    [found] = survey(loaded, ready, [StrategyConfig(name="ddp")], (processes,), Machine(link=link), str)
    assert (tried, found.seconds, found.pretended) == (links, seconds, links[-1] is not None)
    assert found.figures is not None
    assert (found.figures.peak, found.figures.messages) == ((10, 2) if links[0] else (9, 0))


def test_the_fastest_that_fits_is_written_into_the_configuration(surveyed: Surveyed) -> None:
    surveyed(
        [
            row("zero3", 4.0, MIB),
            row("tensor", 0.1, 2**60),
            PlacementEstimate("hsdp", 2, reason="no"),
            row("zero1", 1.0, MIB),
        ]
    )
    loaded, words = select_fastest(load("digits", WORDS), str)
    assert words == "placement.strategy: fastest: zero1, 1 s a step, zero3 4 s"
    assert "  processes: 2                          # measured\n" in to_yaml(loaded)
    config = load_again(loaded).config
    assert (config.placement.strategy.name, config.placement.processes) == ("zero1", 2)
    assert config.run.predicted is not None
    assert config.run.predicted.model_dump() == {"strategy": "zero1", "processes": 2, "step_s": 1.0, "peak_bytes": MIB}


def load_again(loaded: LoadedConfig) -> LoadedConfig:
    Path("again.yaml").write_text(to_yaml(loaded), encoding="utf-8")
    return load("again.yaml")


@pytest.mark.parametrize(("processes", "strategy", "tried"), [(2, "zero3", []), (4, "ddp", [4])])
def test_a_run_that_goes_on_keeps_what_was_measured_for_as_many(
    surveyed: Surveyed, processes: int, strategy: str, tried: list[int]
) -> None:
    kept = "run.predicted={strategy: zero3, processes: 2, step_s: 1.0, peak_bytes: 9}"
    Path("a").mkdir()
    Path("a/config.yaml").write_text(to_yaml(load("digits", [kept])), encoding="utf-8")
    found = surveyed([row("ddp", 1.0, MIB)])
    loaded, words = select_fastest(load("digits", [*WORDS[:2], f"placement.processes={processes}", "run.dir=a"]), str)
    assert loaded.config.placement.strategy.name == strategy
    assert found == tried
    assert words.endswith("as measured before") == (not tried)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (
            [row("ddp", 1.0, 900 * 2**40), row("zero3", 2.0, 600 * 2**40)],
            "no strategy fits on 2 processes; zero3 needs the least memory, 614,400 GiB per rank, but only 1 GiB is "
            "free",
        ),
        (
            [PlacementEstimate("ddp", 2, reason="no\nplace")],
            "no strategy could be measured:\nnot measured: ddp on 2: no",
        ),
    ],
)
def test_nothing_that_fits_is_a_mistake_with_what_comes_nearest(
    surveyed: Surveyed, monkeypatch: pytest.MonkeyPatch, rows: list[PlacementEstimate], error: str
) -> None:
    surveyed(rows)
    monkeypatch.setattr(fastest, "get_memory_per_rank", lambda *_: 2**30)
    with pytest.raises(UsageError) as raised:
        select_fastest(load("digits", WORDS), str)
    assert str(raised.value).startswith(f"placement.strategy: fastest: {error}")


def test_what_unpickles_is_measured_only_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.planning.survey._check_and_measure", lambda strategy, *_: strategy.name)
    found = partial(survey, load("digits"), None, process_counts=(2,), machine=Machine(), report=str)
    assert {"ddp", "zero3", "pipeline"} <= {*found(strategies=())}
    assert "parameter_server" not in found(strategies=())
    assert found(strategies=[StrategyConfig(name="parameter_server")]) == ["parameter_server"]


def test_it_has_no_options() -> None:
    with pytest.raises(UsageError, match=r"placement\.strategy\.spokes: fastest has no options"):
        select_fastest(load("digits", [*WORDS, "placement.strategy.spokes=3"]), str)


@pytest.mark.parametrize(
    ("device", "limit", "expected"), [("cpu", None, 250), ("cpu", 600, 150), ("cpu", 5000, 250), ("auto", 600, 40)]
)
def test_ranks_share_what_is_free_of_the_host_or_have_a_card(
    monkeypatch: pytest.MonkeyPatch, device: str, limit: int | None, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=80 + 10 * number)
    )
    monkeypatch.setattr(host, "get_memory_info", lambda: {"free": 1000, "limit": limit})
    assert get_memory_per_rank(Placement(device=device), 4) == expected  # two of the four ranks share a card
