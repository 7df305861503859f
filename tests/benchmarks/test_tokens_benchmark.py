"""A thousand times the data takes no more memory; how long it takes to begin is measured, and not judged here."""

from benchmarks import tokens


def test_both_figures_are_measured_and_that_of_memory_is_met() -> None:
    start, memory = tokens.results(quick=True)
    assert [row.name for row in start.rows] == ["10^6 tokens", "10^9 tokens", "10^6 tokens, and 1 s"]
    assert [row.name for row in memory.rows][2] == "10^6 tokens, and 50 MiB"
    assert [verdict.met for verdict in memory.verdicts] == [True]
    assert memory.rows[0].median > 100  # torch alone has more
