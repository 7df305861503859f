"""Options of a source: each wrong one is named with what it may be, and none is taken silently."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from lockstep.data.options import Count, Fraction, NoOptions, build_options, find_option_errors


@dataclass(frozen=True)
class Options:
    samples: Count
    share: Fraction = 0.1
    kind: Literal["a", "b"] = "a"
    shuffled: bool = False


@pytest.mark.parametrize(
    ("given", "problems"),
    [
        ({"samples": 3}, []),
        ({"samples": 0}, ["options.samples: expected an integer of at least 1, got 0"]),
        ({"samples": "3"}, ["options.samples: expected an integer of at least 1, got '3'"]),
        ({}, ["options.samples: missing; set it, since it has no default"]),
        ({"samples": None}, ["options.samples: missing; set it, since it has no default"]),
        (
            {"samples": 1, "share": 1, "kind": "c"},
            [
                "options.share: expected a fraction of at least 0 and less than 1, such as 0.1, got 1",
                "options.kind: expected one of a, b, got 'c'",
            ],
        ),
        ({"samples": 1, "shuffled": 1}, ["options.shuffled: expected true or false, got 1"]),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], problems: list[str]) -> None:
    assert [*find_option_errors(Options, given)] == problems


def test_unknown_options_are_refused_with_the_near_one() -> None:
    [problem] = find_option_errors(Options, {"samples": 1, "shar": 0.5})
    assert problem.startswith("options.shar: unknown option")
    assert "share" in problem
    assert [*find_option_errors(NoOptions, {"share": 1})] == ["options.share: this dataset has no options; remove it"]


def test_null_is_the_default() -> None:
    assert build_options(Options, {"samples": 2, "share": None, "kind": "b"}) == Options(2, 0.1, "b")
