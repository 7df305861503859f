"""Data parallelism: each process has the full model, and processes some of the micro-batches of a step.

The name and the gradient buckets are from Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training" (VLDB). Unlike DDP, Lockstep adds gradients in the same order as a single process.
"""

from dataclasses import dataclass
from typing import Final, Literal, final

import torch

from lockstep.core.work import check_microbatches
from lockstep.errors import UsageError
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.layouts.replicated import replicated
from lockstep.parallel.powersgd import make_low_rank_layout
from lockstep.strategies.base import Count, Engine, MakeOptimizer, Mesh, Mib, Numerics, Problem, Traits, World

_SENT_DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
_COMPRESSION_TEXT: Final = {
    "fp16": "in fp16",
    "bf16": "in bf16",
    "powersgd": "as two low-rank matrices: neither exact nor close, because the rest is only added in later steps",
}
_DEFAULT_RANK: Final = 2  # the rank that Vogels et al. 2019 use for ResNets


@final
@dataclass(frozen=True)
class Strategy:
    """The options of data parallelism.

    - `bucket_mib`: the approximate bucket size of the gradient communication, which overlaps with the backward pass.
    - `compress`: the precision to which gradients are rounded before they are sent and added. The result is then only
      close to the result of one process. With `powersgd`, ranks send each gradient matrix as two low-rank matrices, and
      the result is an approximation.
    - `powersgd_rank`: the number of columns of these matrices. Defaults to 2.
    """

    bucket_mib: Mib = 8.0
    compress: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    powersgd_rank: Count | None = None

    @property
    def traits(self) -> Traits:
        """The properties of the strategy with its current options."""
        return Traits(
            cuts="the micro-batches of a step",
            needs="at most as many processes as micro-batches; memory for the whole model on each process",
            communication="the sum of the gradients once per step, overlapping with backward"
            + ("" if self.compress == "none" else f", {_COMPRESSION_TEXT[self.compress]}"),
            exactness="none" if self.compress == "powersgd" else "bits" if self.compress == "none" else "close",
            sent=self.compress if self.compress in ("fp16", "bf16") else None,
            lends_wholes=self.compress == "none",
            syncs_batchnorm=True,
            cuts_sequences=self.compress == "none",
        )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError if there are fewer micro-batches than processes, or if options contradict each other."""
        if self.powersgd_rank is not None and self.compress != "powersgd":
            raise UsageError(
                f"strategy ddp: powersgd_rank requires compress=powersgd, got compress={self.compress}; set "
                f"compress=powersgd, or don't set powersgd_rank"
            )
        check_microbatches(processes, microbatches)

    def mesh(self, processes: int) -> Mesh:
        """Return a mesh in which each process is a replica."""
        return Mesh(replicate=processes)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine of this rank."""
        mesh, bucket_bytes = self.mesh(world.size), int(self.bucket_mib * 2**20)
        if self.compress == "powersgd" and world.size > 1:
            make_layout = make_low_rank_layout(
                world, mesh, bucket_bytes, self.powersgd_rank or _DEFAULT_RANK, numerics.seed
            )
        else:
            sent, chunks = _SENT_DTYPES.get(self.compress), numerics.recipe.model.sequence_chunks
            make_layout = replicated(world, mesh, bucket_bytes, sent, chunks)
        return DataParallelEngine(problem, make_optimizer, world, numerics, mesh, make_layout)
