"""Which tensors ranks disagree on, and which rank is the odd one."""

import pytest
import torch
import worlds
from torch import Tensor

from lockstep.comm.world import World
from lockstep.core.order import get_subrange
from lockstep.core.shard import MaybeSharded, Shard
from lockstep.training.agreement import Disagreement, find_disagreement


def held(world: World, name: str, tensor: Tensor, layout: str) -> MaybeSharded:
    """Return what a rank holds: all, its own rows, or the rows that it shares with every other rank but one."""
    if layout == "whole" or name == "buffer":
        return tensor
    if layout == "replicas":
        rows = get_subrange(len(tensor), 2, world.rank % 2)
        return Shard(tensor[rows.start : rows.stop], rows.start, tensor.shape, primary=world.rank < 2)
    rows = get_subrange(len(tensor), world.size, world.rank)
    return Shard(tensor[rows.start : rows.stop], rows.start, tensor.shape)


def compared(world: World, layout: str, wrong: list[tuple[int, str]]) -> Disagreement | None:
    """Flip the lowest bit of a tensor's first element on the ranks in `wrong`, differently on each, and compare."""
    tensors = {name: torch.linspace(1.0, 2.0, 12).reshape(6, 2) for name in ("weight", "buffer")}
    for rank, name in wrong:
        if rank == world.rank:
            tensors[name].view(torch.int32)[0, 0] ^= 1 << rank
    found = find_disagreement(world, {name: held(world, name, tensor, layout) for name, tensor in tensors.items()})
    return None if found is None else Disagreement(found.names, found.minority_ranks, ("host",) * len(found.hosts))


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize(
    ("size", "layout", "wrong", "names", "odd"),
    [
        (3, "whole", [], (), ()),
        (3, "whole", [(0, "weight")], ("weight",), (0,)),
        (3, "whole", [(2, "weight"), (2, "buffer")], ("buffer", "weight"), (2,)),
        (3, "whole", [(1, "weight"), (2, "weight")], ("weight",), None),
        (3, "whole", [(1, "buffer"), (2, "buffer"), (0, "weight")], ("buffer", "weight"), None),
        (2, "whole", [(1, "buffer")], ("buffer",), None),
        (3, "rows", [], (), ()),
        (3, "rows", [(0, "buffer")], ("buffer",), (0,)),
        (3, "rows", [(0, "weight")], (), ()),  # nobody else has its rows
        (4, "replicas", [], (), ()),
        (4, "replicas", [(2, "weight")], ("weight",), None),
    ],
)
def test_the_odd_rank_is_named_where_a_majority_agrees(size, layout, wrong, names, odd):
    expected = Disagreement(names, odd, ("host",) * size) if names else None
    assert worlds.run(size, compared, layout, wrong) == [expected] * size


def test_who_is_wrong_in_words():
    hosts = ("a", "b", "c", "d")
    assert Disagreement(("w",), (2,), hosts).verdict == "rank 2 (c) has different values than the majority"
    assert Disagreement(("w",), (1, 2), hosts).verdict == "rank 1 (b), 2 (c) have different values than the majority"
    assert "two ranks disagree" in Disagreement(("w",), None, ("a", "b")).verdict
    assert "the ranks disagree without a majority" in Disagreement(("w",), None, hosts).verdict
    assert Disagreement(tuple("abcdefg"), None, hosts).name_list == "a, b, c, d, e and 2 more"
