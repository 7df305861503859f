"""`lockstep strategies`: a paragraph for each when piped, a table on a terminal, from the strategies' own words."""

from importlib import import_module

import pytest
from conftest import invoke

from lockstep.commands import strategies as listing
from lockstep.strategies import list_strategy_names

pytestmark = pytest.mark.slow("runs whole commands")


def test_piped_every_strategy_has_a_paragraph():
    paragraphs = invoke("strategies").output.rstrip("\n").split("\n\n")
    assert [each.splitlines()[0] for each in paragraphs] == list_strategy_names()
    for each in paragraphs:
        labels = [line.split(":")[0].strip() for line in each.splitlines()[1:]]
        assert labels == ["cuts", "exactness", "needs", "communication"]
        assert all(line.partition(":")[2].strip() for line in each.splitlines()[1:])


@pytest.mark.parametrize("name", list_strategy_names())
def test_the_words_are_the_strategys_own(name):
    traits = import_module(f"lockstep.strategies.{name}").Strategy().traits
    assert listing.make_row(name) == (name, traits.cuts, traits.exactness, traits.needs, traits.communication)


def test_on_a_terminal_the_table_holds_the_same_names(capsys):
    listing.print_table([listing.make_row(name) for name in list_strategy_names()])
    printed = capsys.readouterr().out
    assert all(name in printed for name in list_strategy_names())


def test_a_word_too_many_is_a_mistake():
    invoke("strategies", "ddp", code=2)
