"""`lockstep recipes`: a plain table when piped, a drawn one on a terminal."""

from click.testing import CliRunner

from lockstep.cli import main
from lockstep.commands import recipes
from lockstep.config.load import shipped


def test_piped_it_is_plain_text_with_a_line_for_each_recipe():
    result = CliRunner().invoke(main, ["recipes"])
    head, *lines = result.output.splitlines()
    assert result.exit_code == 0
    assert head.split() == ["name", "model", "data", "batch", "length", "description"]
    assert [line.split()[0] for line in lines] == list(shipped())
    assert "digits_convnet" in next(line for line in lines if line.startswith("digits "))


def test_every_recipe_begins_with_its_description():
    rows = [recipes.row(name, file) for name, file in shipped().items()]
    assert all(row.description for row in rows)


def test_on_a_terminal_the_table_holds_the_same_names(capsys):
    recipes.draw([recipes.row(name, file) for name, file in shipped().items()])
    printed = capsys.readouterr().out
    assert all(name in printed for name in shipped())
