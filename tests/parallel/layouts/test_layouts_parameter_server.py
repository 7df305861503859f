"""A server waits for all that is pushed, and holds weights back until they are new; tests of bits are in same_bits."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import toys
import worlds
from toys import Case

from lockstep.comm.peer_errors import PeerLostError
from lockstep.core.shard import Shard
from lockstep.core.tree import LeafBlock
from lockstep.parallel.layouts.parameter_server import Server


def test_weights_are_held_back_until_their_update_is_done() -> None:
    server = Server(num_ranks=3, timeout_s=5)
    early = server.pull(1)
    assert not early.done()
    server.release([torch.ones(2)])
    late = server.pull(1)
    assert [each.tolist() for each in early.wait() + late.wait()] == [[1.0, 1.0]] * 2
    assert not server.pull(2).done()


def test_the_server_waits_for_every_worker() -> None:
    server = Server(num_ranks=3, timeout_s=5)
    with ThreadPoolExecutor(1) as beside:
        found = beside.submit(server.collect, 4)
        server.push(5, {})  # of the next sum
        server.push(4, {LeafBlock(2, 1): torch.ones(1)})
        assert not found.done()
        server.push(4, {})  # one that had no micro-batch
        assert [list(pieces) for pieces in found.result(5)] == [[LeafBlock(2, 1)], []]


def test_a_worker_that_pushes_nothing_is_lost_in_time() -> None:
    server = Server(num_ranks=3, timeout_s=0.05)
    server.push(1, {})
    with pytest.raises(PeerLostError, match=re.escape("got no gradient from 1 of 2 workers within 0.05 s")):
        server.collect(1)


def held(world, case):
    """Return how many elements of the optimizer's state this rank has, and its gradients' rows."""
    engine, _ = toys.trained(world, case)
    kept = [each for each in engine.state().optimizer.values() if isinstance(each, Shard)]
    engine.close()
    return sum(each.tensor.numel() for each in kept), sum(each.shape.numel() for each in kept)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_rank_0_alone_has_the_optimizers_state() -> None:
    (server, whole), *workers = worlds.run(3, held, Case(strategy="parameter_server", optimizer="adamw"))
    assert server == whole > 0
    assert workers == [(0, whole)] * 2


class Scaled(toys.Plain):
    """A model with a parameter that has no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_a_parameter_without_dims_is_refused() -> None:
    with pytest.raises(worlds.WorldError, match="parameter scale has no dims, so it cannot be sharded; use shape"):
        worlds.run(2, held, Case(strategy="parameter_server", model=Scaled))
