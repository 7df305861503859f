"""The processes of a replica share out the chunks of its sequences, and are neighbours."""

import re

import pytest

from lockstep.core.mesh import Mesh
from lockstep.errors import UsageError
from lockstep.strategies.context import Strategy


def test_neighbours_share_sequences() -> None:
    mesh = Strategy(replicate=2).mesh(6)
    assert mesh == Mesh(replicate=2, context=3)
    assert mesh.groups("context") == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("replicate", "processes", "problem"),
    [
        (3, 4, "strategy context: replicate=3 does not divide 4 processes; use 1, 2, 4"),
        (4, 4, "4 processes but only 2 micro-batches; use at most 2"),
    ],
)
def test_what_does_not_fit_is_refused(replicate: int, processes: int, problem: str) -> None:
    Strategy().check(processes, 1)  # however few micro-batches: all have work in each
    with pytest.raises(UsageError, match=re.escape(problem)):
        Strategy(replicate=replicate).check(processes, 2)
