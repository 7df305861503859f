"""Own data of any structure, without validation: trained, proved, and refused where there is nothing to evaluate."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("runs whole commands")

NAMED = ("recipe.model.name=own_words:mean", "recipe.data.name=own_words:words", "recipe.data.collate=own_words:padded")
RECIPE = """
recipe:
  task: regression
  model: {name: "own_words:mean"}
  data: {name: "own_words:words", collate: "own_words:padded"}
  batch: 15
  microbatches: 4
  epochs: 2
  optimizer: {name: adamw, lr: 0.01}
placement: {device: cpu}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "words.yaml").write_text(RECIPE)
    return str(tmp_path / "words.yaml")


def test_dicts_with_a_collate_give_the_same_bits_on_three_ranks(run, recipe: str) -> None:
    one = run("train", recipe, "placement.processes=1", "run.dir=one")
    three = run("train", recipe, "placement.processes=3", "placement.workers=1", "run.dir=three")
    assert one.sha256 == three.sha256
    refused = run("eval", str(one.folder / "one"), *NAMED, code=2)
    assert "dataset own_words:words: has no validation split, so there is nothing to evaluate" in refused.err
    foreign = run("eval", str(one.folder / "one"), *NAMED[:2], code=2)
    assert "recipe.data.collate=own_words:padded" in foreign.err


def test_it_is_verified_without_an_evaluation(run, recipe: str) -> None:
    assert "all agree" in run("verify", recipe, "placement.processes=2", "--steps=2").out
