"""What a recipe names by import path decides the numbers as what is shipped does: on any ranks, and after a kill."""

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import DIGITS
from forked import events

pytestmark = pytest.mark.slow("runs whole commands")

OWN = Path(__file__).parent.parent / "parallel" / "own_optimizers.py"
SCHEDULES = Path(__file__).with_name("own_schedules.py")
TRAIN = (
    "train",
    *DIGITS,
    "recipe.microbatches=4",
    "recipe.optimizer={name: 'mine.steps:Lion', lr: 0.001}",
    "recipe.schedule={name: 'mine.rates:one_cycle', options: {peak: 0.4}}",
)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A package of a user's in the current folder."""
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(OWN, folder / "steps.py")
    shutil.copy(SCHEDULES, folder / "rates.py")
    return folder


def test_own_optimizer_and_schedule_give_the_same_bits_however_it_is_placed_and_resumed(
    run, killed, mine: Path
) -> None:
    placed = {
        "one": ("placement.processes=1",),
        "zero1": ("placement.processes=3", "placement.strategy=zero1"),
        "pipeline": ("placement.processes=2", "placement.strategy=pipeline"),
    }
    hashes = {name: run(*TRAIN, f"run.dir={name}", *words).sha256 for name, words in placed.items()}
    assert len({*hashes.values()}) == 1, hashes
    again = (*TRAIN, "run.save_every.steps=5")
    killed(*again, "placement.processes=1", run="again", step=7)
    resumed = run(*again, "run.dir=again", "placement.processes=2", "placement.strategy=zero3")
    assert resumed.sha256 == hashes["one"]
    assert events(resumed.folder / "again", "started")[-1]["step"] >= 5


def test_its_source_is_part_of_the_recipe(run, mine: Path) -> None:
    words = (*TRAIN, "run.save_every.steps=20", "placement.processes=1")
    trained = run(*words, "run.dir=run")
    for file in ("environment.json", "checkpoints/step-00000020/state.json"):
        source = json.loads((trained.folder / "run" / file).read_text())["source"]
        assert {"mine/steps.py", "mine/rates.py"} <= source.keys()
    (mine / "steps.py").write_text(f"# changed\n{OWN.read_text()}")
    changed = run(*words, "run.dir=other", "run.resume=run/checkpoints/step-00000020")
    assert "your source files changed since step 20 was saved: mine/steps.py; the run continues" in changed.err


def test_eval_runs_it_only_where_the_command_says_so(run, mine: Path) -> None:
    run(*TRAIN, "run.dir=run", "placement.processes=1", "recipe.loss=cross_entropy")
    named = ("recipe.optimizer.name=mine.steps:Lion", "recipe.schedule.name=mine.rates:one_cycle")
    refused = run("eval", "run", named[1], code=2)
    assert re.search(r"its recipe references code, .* recipe\.optimizer\.name=mine\.steps:Lion", refused.err)
    assert "evaluated 360 of 360" in run("eval", "run", *named).out
