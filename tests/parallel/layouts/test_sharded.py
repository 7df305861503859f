"""Models that do not call all of their blocks in each micro-batch, on ranks that gather these from each other."""

import pytest
import toys
import wayward
import worlds
from same_bits import Placed, assert_same_bits
from toys import Case

PLACED: list[Placed] = [
    ("ddp", 2, ()),
    ("zero1", 2, ()),
    ("zero2", 2, ()),
    ("zero2", 3, ()),
    ("zero3", 2, ()),
    ("zero3", 3, ()),
    ("hsdp", 4, (("replicate", 2),)),
]


@pytest.mark.worlds
@pytest.mark.parametrize("model", [wayward.Experts, wayward.LayerDrop, wayward.Routed, wayward.Frozen])
def test_blocks_need_not_be_called_in_each_micro_batch(model):
    case = Case(6, clip=0.5, model=model)
    for placed in PLACED:
        assert_same_bits(case, placed)


@pytest.mark.worlds
def test_a_block_that_others_cannot_gather_is_refused():
    """Not a deadlock: the rank that calls it sees it before any exchange."""
    case = Case(6, model=wayward.Twice, strategy="zero3")
    with pytest.raises(worlds.WorldError, match=r"blocks.1 is called more often than in the first forward"):
        worlds.run(2, toys.whole_trace, case)
