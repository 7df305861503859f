"""Patterns over names: what they select, and what is said of one that selects nothing."""

import pytest

from lockstep.common.patterns import list_some, matches_any, select_names
from lockstep.errors import UsageError

NAMES = ["stem.weight", "stem.bias", "blocks.0.norm.weight", "blocks.1.norm.weight", "head.weight"]


def test_a_star_stands_for_dots_too() -> None:
    assert select_names("freeze", ["blocks.*", "*.bias"], NAMES) == {*NAMES[1:4]}
    assert matches_any("blocks.10.norm.weight", ["blocks.1?.*"])
    assert not matches_any("Stem.weight", ["stem.*"])  # whatever the platform's file names do


def test_a_pattern_that_selects_nothing_is_refused_with_near_names() -> None:
    with pytest.raises(UsageError) as error:
        select_names("recipe.model.freeze", ["stem.*", "heed.weight"], NAMES)
    text = "recipe.model.freeze: 'heed.weight' matches no parameter; did you mean 'head.weight'"
    assert str(error.value).startswith(text)


def test_without_near_names_some_are_listed() -> None:
    with pytest.raises(UsageError, match="matches no parameter; names: n0, n1, n2, n3, n4, n5, n6, n7 and 1 more"):
        select_names("freeze", ["xyzzy*"], [f"n{number}" for number in range(9)])


def test_few_names_are_listed_whole() -> None:
    assert list_some(["a", "b"]) == "a, b"
