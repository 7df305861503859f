"""`lockstep eval` on folders that strangers made: what they name runs only if the user names it too."""

import shutil
from pathlib import Path

import forging
import pytest
from conftest import DIGITS

pytestmark = pytest.mark.slow("runs whole commands")

EVIL = """
from pathlib import Path
Path("ran").touch()
anything = None
"""

SIZES = """
from pathlib import Path
from torch.nn import functional

def loss(outputs, targets):
    with Path("sizes").open("a") as file:
        print(len(targets), file=file)
    return functional.cross_entropy(outputs, targets, reduction="sum")
"""


@pytest.fixture
def latest(finished, tmp_path: Path) -> Path:
    """Return the newest checkpoint of a run folder, `run` in the test's folder, whose loss is a user's."""
    shutil.copytree(finished("recipe.microbatches=4").folder / "run", tmp_path / "run", symlinks=True)
    return (tmp_path / "run" / "checkpoints" / "latest").resolve()


@pytest.mark.parametrize("section", ["model", "data", "loss"])
def test_code_that_only_the_folder_names_does_not_run(run, start, latest, tmp_path, section):
    (tmp_path / "evil.py").write_text(EVIL)

    def named(state):
        state["recipe"]["loss"] = {"name": "cross_entropy"}
        state["recipe"][section] = {"name": "evil:anything"}

    forging.change(latest, named)
    refused = run("eval", "run", code=2)
    assert f"which would run with your permissions: recipe.{section}.name=evil:anything; to run this" in refused.err
    assert not (tmp_path / "ran").exists()
    start("eval", "run", "--trust").wait()  # whatever comes of it
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("words", ["predict run one.png", "report --examples run"])
def test_nor_does_it_under_other_commands(run, latest, tmp_path, words):
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "one.png").touch()
    forging.change(latest, lambda state: state["recipe"]["model"].update(name="evil:anything", source="auto"))
    refused = run(*words.split(), "recipe.loss.name=held:cross_entropy", code=2)
    assert "permissions: recipe.model.name=evil:anything; to run this code, add these overrides" in refused.err
    assert not (tmp_path / "ran").exists()
    run(*words.split(), "--trust", code=2)
    assert (tmp_path / "ran").exists()


def test_code_that_the_command_names_runs(run, latest):
    refused = run("eval", "run", code=2)
    assert "recipe.loss.name=held:cross_entropy" in refused.err
    for words in (("recipe.loss.name=held:cross_entropy",), ("recipe.loss=held:cross_entropy",), ("--trust",)):
        assert "evaluated 360 of 360" in run("eval", "run", *words).out
    other = run("eval", "run", "recipe.loss.name=held:failing", "placement.processes=1")
    assert "evaluated 360 of 360" in other.out


def test_as_many_samples_are_evaluated_at_a_time_as_the_recipe_says(run, latest, tmp_path):
    (tmp_path / "sizes.py").write_text(SIZES)
    words = ("eval", "run", "recipe.loss.name=sizes:loss", "placement.processes=1")
    first, other = run(*words), run(*words, "recipe.evaluation_batch=100")
    sizes = (tmp_path / "sizes").read_text().split()
    assert sizes[-4:] == ["100", "100", "100", "60"]
    assert sizes.count("16") >= 360 // 16  # without the key, those of a micro-batch
    assert all("evaluated 360 of 360" in each.out for each in (first, other))


def test_the_config_of_the_folder_names_no_code_either(run, latest, tmp_path):
    (tmp_path / "evil.py").write_text(EVIL)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("held:cross_entropy", "evil:anything"))
    refused = run("eval", "run", "recipe.loss.name=held:cross_entropy", code=2).err
    assert "does not belong to the run of run/config.yaml" in refused
    assert not (tmp_path / "ran").exists()


def test_a_state_of_another_form_is_one_error(run, latest):
    forging.change(latest, lambda state: state["progress"].update(step="many"))
    refused = run("eval", "run", "--trust", code=2)
    assert (
        "state.json: does not match the format of this version:\nprogress.step: input should be a valid integer"
        in refused.err
    )
    assert "Traceback" not in refused.err


def test_an_evaluation_needs_no_optimizer(run, latest):
    before = run("eval", "run", "--trust").out
    forging.write(latest, "optimizer.safetensors", (8).to_bytes(8, "little") + b"{}      ")
    assert run("eval", "run", "--trust").out == before


def test_weights_are_evaluated_without_a_run(run, latest, tmp_path):
    trained = run("eval", "run", "--trust").out.splitlines()
    told = run("eval", *DIGITS, "recipe.model.weights=run", "placement.processes=1").out.splitlines()
    assert told == ["run", *trained[1:]]


def test_a_checkpoint_of_another_run_in_the_folder_is_refused(run, latest):
    forging.change(latest, lambda state: state["recipe"].update(seed=8))
    refused = run("eval", "run", "--trust", code=2).err
    assert "does not belong to the run of run/config.yaml" in refused
    assert "seed: 0 there, 8" in refused
