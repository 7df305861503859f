"""The report: ratios by round, targets in both directions, and everything in the JSON."""

import json
import re

import pytest

from benchmarks.report import Target, as_json, compare, in_words, ratio_of, show

pytestmark = pytest.mark.slow("other programs, or minutes")

TURNS = {"peer": [1.0, 10.0, 100.0], "ours": [2.0, 11.0, 90.0]}


def test_ratios_compare_figures_of_the_same_round() -> None:
    result = compare("a", "title", "s", TURNS, "peer")
    peer, ours = result.rows
    assert (peer.ratio, ours.median, ours.turns) == (1.0, 11.0, [2.0, 11.0, 90.0])
    assert ours.ratio == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("bound", "times", "met", "word"),
    [
        ("at most", 2.0, True, "met"),
        ("at most", 0.89, False, "MISSED"),
        ("at most", 1.1, None, "undecided"),
        ("at least", 0.9, True, "met"),
        ("at least", 2.01, False, "MISSED"),
        ("at least", 1.1, None, "undecided"),
    ],
)
def test_a_target_that_the_interval_of_the_ratio_contains_is_undecided(
    bound: str, times: float, met: bool | None, word: str
) -> None:
    target = Target("ours", "peer", bound, times)  # type: ignore[arg-type]
    (verdict,) = compare("a", "title", "s", TURNS, "peer", [target]).verdicts
    assert verdict.met is met
    assert in_words(verdict).endswith(f"measured 1.100 x (0.900 to 2.000): {word}")


def test_the_interval_of_a_median_leaves_out_the_turns_that_chance_does_not_need() -> None:
    """The table of order statistics for a 95 % interval: ranks 1 and 6 of 6, 2 and 9 of 10, 4 and 12 of 15."""
    for count, first, last in ((3, 1, 3), (6, 1, 6), (10, 2, 9), (15, 4, 12), (20, 6, 15)):
        ratios = [float(number) for number in range(1, count + 1)]
        assert ratio_of(ratios, [1.0] * count)[1] == (first, last)


def test_the_json_holds_every_turn_the_targets_and_the_machine() -> None:
    result = compare("a", "title", "s", TURNS, "peer", [Target("ours", "peer", "at most", 1.05)])
    figures = json.loads(json.dumps(as_json([result], load_before=0.5, quick=True)))
    assert figures["quick"]
    assert figures["machine"]["load_before"] == 0.5
    assert {"date", "cpu", "cores", "python", "packages"} < figures["machine"].keys()
    assert figures["machine"]["packages"]["torch"]
    assert re.fullmatch("[0-9a-f]{12,40}(-dirty)?", figures["machine"]["commit"])
    (kept,) = figures["results"]
    assert {row["name"]: row["turns"] for row in kept["rows"]} == TURNS
    assert kept["verdicts"][0]["target"]["times"] == 1.05
    assert kept["verdicts"][0]["met"] is None
    assert kept["verdicts"][0]["interval"] == [0.9, 2.0]


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
    assert "ours: at most 1.00 x peer; measured 0.000 x (0.000 to 0.000): met" in printed
