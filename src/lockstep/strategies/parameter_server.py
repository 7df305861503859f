"""A parameter server: one process runs the optimizer. The other processes push gradients and pull weights.

Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server" (OSDI). With `asynchronous`, this is
the Downpour SGD of Dean et al. 2012, "Large Scale Distributed Deep Networks" (NIPS). Rank 0 is the server and also
computes, so all W processes compute. All communication goes through rank 0, which receives W - 1 times the gradients
and sends W - 1 times the weights. In an all-reduce, each process only sends about twice the size of the gradients,
regardless of the number of processes, so all-reduces have replaced parameter servers. For measurements, see
benchmarks/parameter_server.py.
"""

from dataclasses import dataclass
from typing import final

from lockstep.comm.rpc import Rpc
from lockstep.core.work import check_microbatches
from lockstep.parallel.asynchronous import AsynchronousEngine
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.layouts.parameter_server import Server, make_parameter_server_layout
from lockstep.parallel.mesh_engine import make_mesh_engine
from lockstep.strategies.base import Engine, MakeOptimizer, Mesh, Mib, Numerics, Problem, Traits, World


@final
@dataclass(frozen=True)
class Strategy:
    """The options of the parameter server.

    - `asynchronous`: apply each gradient when it arrives, so that no rank waits for another rank.
    - `bucket_mib`: the approximate size of the buckets in which gradients are pushed during the backward pass. Not used
      with `asynchronous`.
    """

    asynchronous: bool = False
    bucket_mib: Mib = 8.0

    @property
    def traits(self) -> Traits:
        """The properties of the strategy with its current options."""
        return Traits(
            cuts="the micro-batches of a step; only rank 0 has the optimizer state",
            needs="at most as many processes as micro-batches; memory for the whole model on each process; "
            "unless asynchronous, an optimizer that updates each tensor independently; a network in which you trust "
            "everyone, because RPC unpickles",
            communication="gradients to rank 0 and new weights back, once per step. With asynchronous, each gradient "
            "updates the weights when it arrives: neither exact nor close, and no two runs are the same",
            exactness="none" if self.asynchronous else "bits",
            cuts_rows=not self.asynchronous,
            lends_wholes=True,
            audits=not self.asynchronous,
            by_peers=True,
            unpickles=True,
        )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError if there are fewer micro-batches than processes."""
        check_microbatches(processes, microbatches)

    def mesh(self, processes: int) -> Mesh:
        """Return a mesh in which each process is a replica."""
        return Mesh(replicate=processes)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine of this rank."""
        if self.asynchronous:
            return AsynchronousEngine(problem, make_optimizer, world, numerics)
        mesh = self.mesh(world.size)
        if world.size == 1:
            return make_mesh_engine(problem, make_optimizer, world, numerics, mesh)
        server = Server(world.size, world.timeout_s)
        calls = Rpc(world, server.push, server.pull)
        make_layout = make_parameter_server_layout(world, server, calls, int(self.bucket_mib * 2**20))
        return DataParallelEngine(problem, make_optimizer, world, numerics, mesh, make_layout, calls.close)
