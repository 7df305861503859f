"""A strategy by import path trains to the bits of one process, and what is wrong with one is told before a run."""

import json
import re
import signal

import pytest
from conftest import DIGITS
from test_resume import TRAIN, stop, undisturbed

from lockstep.config.load import load
from lockstep.setup.strategy import find_strategy
from lockstep.strategies import list_strategy_names
from lockstep.strategies.base import Strategy

pytestmark = pytest.mark.slow("runs whole commands")

OWN = "own_strategies"
LATE = (f"placement.strategy.name={OWN}:Late", "placement.processes=3", "recipe.microbatches=4")


@pytest.mark.parametrize("name", list_strategy_names())
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


def test_one_that_fails_as_it_starts_ends_the_run_with_its_line(run) -> None:
    failed = run(*TRAIN, *LATE, "placement.strategy.fault=start", code=2)
    assert re.search(r"RuntimeError: no engine \(\S+own_strategies\.py:38\)", failed.err)
    assert failed.err.count("error: ") == 1
    assert "Traceback" not in failed.err
