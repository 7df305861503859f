"""A run that began with the default of an earlier version resumes with it."""

from pathlib import Path

import pytest

from lockstep.config.load import load, to_yaml

RECIPE = "recipe: {model: digits_convnet, data: digits, batch: 64, epochs: 1, optimizer: {lr: 0.1}}"


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, str]:
    """A recipe that leaves the number of micro-batches out, and the folder of a run that began with eight."""
    (tmp_path / "mine.yaml").write_text(RECIPE, encoding="utf-8")
    began = load(str(tmp_path / "mine.yaml"), ["recipe.microbatches=8"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(began), encoding="utf-8")
    return str(tmp_path / "mine.yaml"), f"run.dir={tmp_path / 'run'}"


def test_the_number_of_micro_batches_of_a_run_stays_when_its_default_has_changed(words: tuple[str, str]) -> None:
    recipe, folder = words
    assert load(recipe).config.recipe.microbatches == 2
    resumed = load(recipe, [folder, "placement.processes=4"])
    assert resumed.config.recipe.microbatches == 8
    assert "run/config.yaml:" in resumed.origins["recipe.microbatches"]


@pytest.mark.parametrize(
    "word",
    ["recipe.microbatches=2", "recipe.microbatch=32", "run.resume=never", "recipe.batch=63", "run.dir=elsewhere"],
)
def test_a_recipe_that_asks_for_something_else_gets_it(words: tuple[str, str], word: str) -> None:
    recipe, folder = words
    assert load(recipe, [folder, word]).config.recipe.microbatches == 2


def test_a_folder_that_cannot_be_read_is_left_to_the_start(words: tuple[str, str], tmp_path: Path) -> None:
    recipe, folder = words
    (tmp_path / "run" / "config.yaml").write_bytes(b"\xff{")
    assert load(recipe, [folder]).config.recipe.microbatches == 2
