"""`lockstep recipes`: a plain table when piped, a drawn one on a terminal."""

import pytest
from conftest import invoke

from lockstep.commands import recipes
from lockstep.config.shipped import list_shipped_recipes

pytestmark = pytest.mark.slow("runs whole commands")


def test_piped_it_is_plain_text_with_a_line_for_each_recipe():
    head, *lines = invoke("recipes").output.splitlines()
    assert head.split() == ["name", "model", "data", "batch", "length", "description"]
    assert [line.split()[0] for line in lines] == list(list_shipped_recipes())
    assert "digits_convnet" in next(line for line in lines if line.startswith("digits "))


def test_every_recipe_begins_with_its_description():
    rows = [recipes.make_row(each) for each in list_shipped_recipes().values()]
    assert all(row.description for row in rows)


@pytest.mark.parametrize("columns", [30, 60, 80, 140])
def test_a_narrow_terminal_gets_whole_words(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    recipes.print_table([recipes.make_row(each) for each in list_shipped_recipes().values()])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    said = " ".join(" ".join(lines).split())
    assert all(f"{name} " in said for name in list_shipped_recipes())
    assert "ResNet-18 on ImageNet." in said
    assert columns == 140 or "resnet18, folder, batch 256, 100 epochs" in said
