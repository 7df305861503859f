"""Suggestions for mistyped names."""

import pytest

from lockstep.common.names import find_nearest, format_choices, format_suggestion


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("momentun", "; did you mean 'momentum'?"),
        ("MOMENTUM", "; did you mean 'momentum'?"),
        ("xyz", ""),
    ],
)
def test_suggestion(typed, expected):
    assert format_suggestion(typed, ["name", "momentum", "nesterov"]) == expected


def test_several_near_names_are_all_offered_the_nearest_first():
    assert format_suggestion("resnet5", ["resnet50", "resnet152", "vgg"]) == "; did you mean 'resnet50' or 'resnet152'?"


def test_nearest_keeps_the_spelling_of_the_valid_name():
    assert find_nearest("adamw", ["AdamW"]) == ["AdamW"]


def test_choices_always_list_what_is_valid():
    many = [f"key{number}" for number in range(9)]
    assert format_choices("keey1", many).count("key") == 3  # none but the nearest
    assert format_choices("x", many) == f"; valid: {', '.join(many)}"
    assert format_choices("dpp", ["auto", "ddp"]) == "; did you mean 'ddp'? Valid: auto, ddp"
    assert format_choices("xyz", ["auto", "ddp"]) == "; valid: auto, ddp"
