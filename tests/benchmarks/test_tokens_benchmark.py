"""A thousand times the data takes no longer to begin with, and no more memory."""

from benchmarks import tokens


def test_both_figures_are_measured_and_met() -> None:
    start, memory = tokens.results(quick=True)
    assert [row.name for row in start.rows] == ["10^6 tokens", "10^9 tokens", "10^6 tokens, and 1 s"]
    assert [row.name for row in memory.rows][2] == "10^6 tokens, and 50 MiB"
    assert all(verdict.met for result in (start, memory) for verdict in result.verdicts)
    assert memory.rows[0].median > 100  # torch alone has more
