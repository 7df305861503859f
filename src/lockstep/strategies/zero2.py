"""ZeRO, second stage: processes share the optimizer's state and the gradients, and from step to step the parameters.

Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models", section 5.2. On torch's
fully_shard, as FSDP's SHARD_GRAD_OP: parameters are gathered once a step, and are whole from forward to backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from lockstep.strategies import zero3
from lockstep.strategies.base import Traits


@final
@dataclass(frozen=True)
class Strategy(zero3.Strategy):
    """`offload`: what is cut is in the memory of the CPU but while a block computes with it; the CPU updates it."""

    named: ClassVar[str] = "zero2"
    keep_gathered: ClassVar[bool] = True
    traits: ClassVar[Traits] = Traits(
        cuts="the micro-batches of a step; gradients and optimizer state, by rows",
        needs="at most as many processes as micro-batches; an optimizer that works element by element",
        communication="the parameters once a step, the gradients of each micro-batch",
        cuts_rows=True,
        syncs_batchnorm=True,
    )
