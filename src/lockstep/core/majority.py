"""Identifies faulty ranks by majority vote if results that should be identical differ."""

from collections import Counter
from collections.abc import Hashable, Iterable


def find_minority(votes: Iterable[tuple[int, Hashable]]) -> list[int] | None:
    """Return the ranks with at least one result that differs from the most frequent result, or [] if all ranks agree.

    `votes` contains (rank, result) pairs. A rank can have several results. Returns None if the vote is inconclusive
    because several results are equally frequent, or because more than half of the ranks have a result that differs. The
    most frequent result doesn't need an absolute majority, because two faulty ranks almost never produce the same bits.
    """
    rank_results = list(votes)
    results = Counter(result for _, result in rank_results).most_common(2)
    if len(results) > 1 and results[0][1] == results[1][1]:
        return None
    ranks = {rank for rank, _ in rank_results}
    outliers = {rank for rank, result in rank_results if result != results[0][0]}
    return None if len(ranks) > 1 and 2 * len(outliers) > len(ranks) else sorted(outliers)
