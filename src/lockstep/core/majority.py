"""Which ranks are wrong where results that should be the same are not."""

from collections import Counter
from collections.abc import Hashable, Iterable


def odd_ones(opinions: Iterable[tuple[int, Hashable]]) -> list[int] | None:
    """Return the ranks that differed, at least once, from the result found most often; none where all agree.

    `opinions` are pairs of a rank and what it found; a rank may have several. None is returned where no result was
    found more often than each other, and where more ranks differed than did not: then it is not they that are at fault.
    Half of the opinions need not agree: two ranks that are wrong do not agree to the bit by chance.
    """
    found = list(opinions)
    results = Counter(result for _, result in found).most_common(2)
    if len(results) > 1 and results[0][1] == results[1][1]:
        return None
    ranks = {rank for rank, _ in found}
    odd = {rank for rank, result in found if result != results[0][0]}
    return None if len(ranks) > 1 and 2 * len(odd) > len(ranks) else sorted(odd)
