"""Findings of several ranks become one list."""

from lockstep.checkup.finding import Finding, get_most_serious_level, merge_ranks

FINE = Finding("cores", "ok", "2")
BAD = Finding("memory", "problem", "0 MiB", "killed", "buy some")
DOUBTFUL = Finding("clock", "warning", "late")


def test_what_all_have_is_said_once_without_ranks() -> None:
    assert merge_ranks({0: [FINE], 1: [FINE]}) == [FINE]


def test_what_some_have_is_said_with_their_ranks() -> None:
    first, second = merge_ranks({0: [FINE], 1: [BAD], 2: [FINE]})
    assert (first.found, first.ranks) == ("2", (0, 2))
    assert (second.found, second.ranks) == ("0 MiB", (1,))


def test_the_worst_of_all_counts() -> None:
    assert get_most_serious_level([FINE, DOUBTFUL, BAD]) == "problem"
    assert get_most_serious_level([FINE, DOUBTFUL]) == "warning"
    assert get_most_serious_level([]) == "ok"
