"""What lockstep.join is told: wrong words are refused all at once, with the line, and none is taken silently."""

import re

import pytest

import lockstep
from lockstep.loop.settings import JoinSettings, validate_settings


def given(
    seed: int = 0, dir: str | None = None, precision: str = "fp32", placement: object = None, run: object = None
) -> JoinSettings:
    return validate_settings(seed, dir, precision, 1, placement, run)  # type: ignore[arg-type]


def test_sections_are_those_of_a_configuration():
    found = given(dir="a", placement={"workers": 2}, run={"sinks": ["csv"], "keep": 1})
    assert (found.run.dir, found.run.keep, found.run.sinks[0].name) == ("a", 1, "csv")
    assert found.placement.workers == 2
    assert given(placement=lockstep.Placement(timeout_s=5)).placement.timeout_s == 5


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"seed": -1}, "seed: expected at least 0; got -1"),
        ({"precision": "bf16-mixed"}, "precision: bf16-mixed is named bf16 in Lockstep"),
        ({"precision": "fp64"}, "precision: expected one of fp32, "),
        (
            {"placement": {"timeot_s": 5}},
            "placement.timeot_s: unknown key; did you mean 'timeout_s' or 'stall_timeout_s'?",
        ),
        (
            {"placement": {"strategy": "zero3"}},
            "placement.strategy: not supported in a custom training loop; pass it to run.place",
        ),
        (
            {"placement": lockstep.Placement(on_corruption="go_on")},
            "placement.on_corruption: not supported in a custom training loop; remove it, because a script cannot "
            "restart itself",
        ),
        (
            {"run": {"save_every": {"steps": 5}}},
            "run.save_every: not supported in a custom training loop; call run.save()",
        ),
        (
            {"dir": "s3:/bucket/a"},
            "run.dir: is neither a path nor the URL of a folder; write s3://bucket/a",
        ),
        ({"run": {"sinks": ["cvs"]}}, "run.sinks.0.name: no such sink; did you mean 'csv'?"),
        (
            {"run": {"resume": "never"}},
            "run.resume: not supported in a custom training loop; remove it: a run resumes from dir",
        ),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(words, text):
    with pytest.raises(lockstep.UsageError, match=r"^\S*test_settings\.py:\d+  " + re.escape(text)):
        given(**words)


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(lockstep.UsageError) as refused:
        given(seed=-1, placement={"workers": -1}, run={"kepp": 1})
    assert len(str(refused.value).splitlines()) == 3
