"""What errors call a value of the user's."""

from typing import Any

import pytest

from lockstep.common.type_name import describe_type


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((1, 2), "a tuple of 2"),
        ([], "a list of 0"),
        ("x", "text"),
        (None, "None"),
        ({}, "an object of type dict"),
        (1.5, "an object of type float"),
    ],
)
def test_values_are_called_by_their_kind(value: Any, words: str) -> None:
    assert describe_type(value) == words
