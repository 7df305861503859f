"""The report: ratios by round, targets in both directions, and everything in the JSON."""

import json

import pytest

from benchmarks.report import Target, as_json, compare, in_words, show

pytestmark = pytest.mark.slow("other programs, or minutes")

TURNS = {"peer": [1.0, 10.0, 100.0], "ours": [2.0, 11.0, 90.0]}


def test_ratios_compare_figures_of_the_same_round() -> None:
    result = compare("a", "title", "s", TURNS, "peer")
    peer, ours = result.rows
    assert (peer.ratio, ours.median, ours.turns) == (1.0, 11.0, [2.0, 11.0, 90.0])
    assert ours.ratio == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("bound", "times", "met"),
    [("at most", 1.1, True), ("at most", 1.09, False), ("at least", 1.1, True), ("at least", 1.11, False)],
)
def test_a_target_is_a_bound_on_the_median_ratio(bound: str, times: float, met: bool) -> None:
    target = Target("ours", "peer", bound, times)  # type: ignore[arg-type]
    (verdict,) = compare("a", "title", "s", TURNS, "peer", [target]).verdicts
    assert verdict.met == met
    assert in_words(verdict).endswith(f"measured 1.100 x: {'met' if met else 'MISSED'}")


def test_the_json_holds_every_turn_the_targets_and_the_machine() -> None:
    result = compare("a", "title", "s", TURNS, "peer", [Target("ours", "peer", "at most", 1.05)])
    figures = json.loads(json.dumps(as_json([result], load_before=0.5, quick=True)))
    assert figures["quick"]
    assert figures["machine"]["load_before"] == 0.5
    assert {"date", "cpu", "cores", "python", "packages"} < figures["machine"].keys()
    assert figures["machine"]["packages"]["torch"]
    (kept,) = figures["results"]
    assert {row["name"]: row["turns"] for row in kept["rows"]} == TURNS
    assert kept["verdicts"][0]["target"]["times"] == 1.05
    assert not kept["verdicts"][0]["met"]


def test_the_table_shows_each_contestant_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    show(
        compare(
            "a",
            "a title",
            "samples/s",
            {"peer": [4000.0], "ours": [0.5]},
            "peer",
            [Target("ours", "peer", "at most", 1)],
        )
    )
    printed = capsys.readouterr().out
    assert "a title" in printed
    assert "4,000" in printed
    assert "ours: at most 1.00 x peer; measured 0.000 x: met" in printed
