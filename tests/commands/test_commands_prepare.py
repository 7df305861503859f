"""`lockstep prepare`: the recipe that it writes gives the weights of the recipe that it was given."""

from pathlib import Path

import pytest
from conftest import DIGITS, FOLDER, Start, invoke

from lockstep.config.load import load

pytestmark = pytest.mark.slow("runs whole commands")

PICTURES = ("digits", *DIGITS[1:], *FOLDER)


def test_pixels_give_the_weights_of_the_pictures(run: Start, images: Path) -> None:
    crops = "recipe.data.augment={resized_crop: true, flip: true}"
    before = run("train", *PICTURES, crops, "run.dir=before")
    run("prepare", *PICTURES, crops, "--to", "pixels/all")
    assert run("train", "pixels/all/recipe.yaml", "placement.processes=2", "run.dir=after").sha256 == before.sha256


def test_only_where_the_data_is_differs(images: Path, here: Path) -> None:
    words = (*PICTURES[1:], "recipe.data.resize_size=9")
    invoke("prepare", "digits", *words, "--to", "pixels")
    before, after = load("digits", words).config, load("pixels/recipe.yaml").config
    data = {"name": "webdataset", "root": str(here / "pixels"), "options": {"classes": ["cat", "dog"]}}
    expected = before.recipe.data.model_copy(update=data)
    assert after.recipe == before.recipe.model_copy(update={"data": expected})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("digits", "--to", "pixels"), "recipe.data.name: samples are not image files"),
        ((*PICTURES, "--to", "images"), "--to images: already exists; remove it, or use a different folder"),
        ((*PICTURES, "--to", "images/train/cat/0.jpg/x"), "cannot write: Not a directory"),
    ],
)
def test_a_refusal_leaves_nothing(images: Path, here: Path, words: tuple[str, ...], said: str) -> None:
    before = sorted(here.rglob("*"))
    found = invoke("prepare", *words, code=2)
    assert said in found.stderr
    assert sorted(here.rglob("*")) == before
