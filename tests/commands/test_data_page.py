"""The whole recipes of docs/data.md, as they stand there, on a text and a table: one hash on one rank and on three."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
BLOCK = re.compile(r"^```(?:yaml|python)\n((?:recipe:|from torch).*?)^```$", re.MULTILINE | re.DOTALL)
LENGTHS = {"book": ("recipe.steps=2",), "houses": ("recipe.epochs=1",)}


@pytest.fixture
def pages(tmp_path: Path) -> None:
    book, houses, models = BLOCK.findall(PAGE.read_text(encoding="utf-8").partition("\n## Add a dataset\n")[0])
    for name, text in (("book.yaml", book), ("houses.yaml", houses), ("my_models.py", models)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 80)
    rows = [f"{each},{each % 7},{('north', 'south')[each % 2]},{each * 1.5 + 0.25}" for each in range(80)]
    (tmp_path / "houses.csv").write_text("\n".join(["id,rooms,side,price", *rows, ""]))


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("name", LENGTHS)
def test_a_recipe_of_the_page_trains_to_one_hash(run, name: str) -> None:
    words = ("train", f"{name}.yaml", *LENGTHS[name], "run.tensorboard=false")
    one, three = (run(*words, f"placement.processes={size}", f"run.dir=on-{size}") for size in (1, 3))
    assert one.sha256 == three.sha256
    assert one.err == three.err == ""
