"""One queue of tests for several processes: pytest-xdist's, by file, with a place of its own for clusters and hosts."""

import marks
from xdist.scheduler import LoadScopeScheduling

CLUSTERS = "clusters"


class Queue(LoadScopeScheduling):
    """Gives the tests of a file to one process, and all that start a cluster or hosts too.

    What these start would be in each other's way; they wait most of the time, so that other tests run beside them.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return CLUSTERS if marks.starts_a_cluster(marks.TESTS.parent / file) else file
