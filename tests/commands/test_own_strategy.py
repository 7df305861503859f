"""A strategy by import path trains to the bits of one process, and what is wrong with one is told before a run."""

import json
import signal
from pathlib import Path

import pytest
from conftest import DIGITS
from test_resume import TRAIN, stop, undisturbed

from lockstep.config.load import load
from lockstep.run.strategy import find_strategy
from lockstep.strategies import names
from lockstep.strategies.base import Strategy

OWN = "own_strategies"
FAULTS = {"check": "not today", "start": "no engine"}
LATE = (f"placement.strategy.name={OWN}:Late", "placement.processes=3", "recipe.microbatches=4")


@pytest.mark.parametrize("name", names())
def test_shipped_strategies_hold_the_contract(name: str) -> None:
    _, strategy = find_strategy(load("digits", [f"placement.strategy={name}"]).config.placement, 2)
    needed = {each for each in vars(Strategy) if not each.startswith("_")}
    assert needed == {"traits", "check", "mesh", "start"}
    assert needed <= set(dir(strategy))


def test_the_bits_are_those_of_one_process_and_its_source_is_recorded(run, finished) -> None:
    trained = run("train", *DIGITS, "run.dir=run", *LATE, "placement.strategy.most=4")
    assert trained.sha256 == undisturbed(finished).sha256
    assert trained.err == ""
    environment = json.loads((trained.folder / "run/environment.json").read_text())
    state = json.loads((trained.folder / "run/checkpoints/step-00000023/state.json").read_text())
    assert "own_strategies.py" in environment["source"]
    assert "own_strategies.py" not in state["source"]  # the next start may have another strategy


def test_a_run_goes_on_from_it_under_another_strategy(start, run, finished) -> None:
    stop(start, *LATE, number=signal.SIGTERM)
    resumed = run(*TRAIN, "recipe.microbatches=4", "placement.processes=2")
    assert resumed.sha256 == undisturbed(finished).sha256
    assert "source files changed" not in resumed.err


def test_verify_compares_it_with_one_process(run) -> None:
    recipe = [word for word in DIGITS if "loss" not in word]
    verified = run("verify", *recipe, *LATE, "--steps=2")
    assert f"{OWN}:Late" in verified.out
    assert "all agree" in verified.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((f"placement.strategy={OWN}:Lat",), f"strategy {OWN}:Lat: module {OWN} ({{file}}) has no 'Lat'; did you mean"),
        (
            (f"placement.strategy={OWN}:Empty",),
            f"strategy {OWN}:Empty: it has no traits, check, mesh, start; add it",
        ),
        ((f"placement.strategy={OWN}:Plain",), f"strategy {OWN}:Plain: it is a class, but no dataclass; name a frozen"),
        ((f"placement.strategy={OWN}:sys",), f"strategy {OWN}:sys: it is of type module; name a frozen"),
        ((*LATE, "placement.strategy.last=4"), "placement.strategy.last: strategy own_strategies:Late has no such"),
        ((*LATE, "placement.strategy.most=many"), "placement.strategy.most: Input should be a valid integer"),
        (
            (*LATE, "placement.strategy.fault=check"),
            "strategy own_strategies:Late: RuntimeError: not today ({file}:{check})",
        ),
        (
            (*LATE, "placement.strategy.fault=mesh"),
            "strategy own_strategies:Late: its mesh for 3 processes is replicate=2; let the lengths multiply to 3",
        ),
        ((*LATE, "placement.strategy.fault=start"), "RuntimeError: no engine ({file}:{start})"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[-1],
)
def test_what_is_wrong_is_told_in_one_message(run, words: tuple[str, ...], told: str) -> None:
    refused = run(*TRAIN, *words, code=2)
    file = Path(__file__).with_name("own_strategies.py")
    lines = {
        fault: number
        for number, line in enumerate(file.read_text().splitlines(), 1)
        for fault in FAULTS
        if FAULTS[fault] in line
    }
    assert told.format(file=file, **lines) in refused.err
    assert refused.err.count("error: ") == 1
    assert "Traceback" not in refused.err
