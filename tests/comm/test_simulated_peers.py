"""One process as one of many ranks: what it would send is counted, and what the others would send is zeros."""

import time
from itertools import pairwise

import torch
import torch.distributed as dist

from lockstep.comm.simulated_peers import simulate_world
from lockstep.core.mesh import Mesh
from lockstep.core.tree import LeafBlock

CPU = torch.device("cpu")


def test_a_rank_among_many_adds_zeros_and_counts_what_it_sends() -> None:
    with simulate_world(0, 64, CPU, 1e9) as (world, traffic):
        vector = torch.full((6400,), 2.0)
        canonical = world.make_canonical_sum(Mesh(64), "replicate", side_stream=False)
        canonical({LeafBlock(0, 1): vector}, 64, vector)
        assert vector[:100].eq(2.0).all()  # its part of the sum
        assert vector[100:].eq(0.0).all()  # of which the others have the rest
        assert traffic.num_bytes == 2 * vector.nbytes * 63 // 64
        assert 0 < traffic.num_messages <= 2 * 6  # halving and doubling
    assert not dist.is_initialized()


def test_collectives_of_torchs_count_as_a_ring_does_them() -> None:
    with simulate_world(1, 4, CPU, 1e6) as (world, traffic):
        began = time.monotonic()
        with traffic:
            world.add_(torch.ones(1000))
        assert time.monotonic() - began >= 0.006  # what the link takes
        assert (traffic.num_messages, traffic.num_bytes) == (6, 2 * 4000 * 3 // 4)
        with traffic:
            dist.all_gather_into_tensor(torch.empty(1000), torch.ones(250))
        assert (traffic.num_messages, traffic.num_bytes) == (9, 3 * 4000 * 3 // 4)
        pair = dist.new_group([0, 1])
        with traffic:
            dist.all_gather_into_tensor(torch.empty(1000), torch.ones(500), group=pair)
            dist.reduce_scatter_tensor(torch.empty(500), torch.ones(1000), group=pair)
        assert (traffic.num_messages, traffic.num_bytes) == (11, 9000 + 2 * 2000)
        assert world.rank == 1
        assert world.size == 4


def test_one_process_alone_needs_no_group() -> None:
    with simulate_world(0, 1, CPU, 1e9) as (world, traffic):
        world.barrier()
        assert not dist.is_initialized()
    assert traffic.num_bytes == 0


def test_what_is_late_keeps_its_rank_waiting_now_more_and_now_less_and_no_collective() -> None:
    with simulate_world(0, 2, CPU, 1e6) as (world, traffic):
        traffic.mean_delay_factor = 20.0
        due = [traffic.record_send(1, 1000).arrival_time for _ in range(40)]
        took = [later - earlier for earlier, later in pairwise(due)]
        assert 0.01 < sum(took) / len(took) < 0.04  # of 1 ms each
        assert min(took) < 0.01 < 0.03 < max(took)
        began = time.monotonic()
        with traffic:
            world.add_(torch.ones(1000))
        assert time.monotonic() < min(due[-1], began + 0.5)
