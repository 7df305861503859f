"""What a compiled cross entropy saves over a large vocabulary: CPU time of forward and backward, compiled and not.

Both compute the loss of the same logits of GPT-2's vocabulary, in this process. `recipe.compile` compiles it like this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from benchmarks.processes import Contestant, Turn, take_measured_turns
from benchmarks.report import Result, Target, compare
from lockstep.comm.world import World
from lockstep.setup.compiled_loss import CompiledLoss
from lockstep.tasks.language import SumLosses, sum_cross_entropy

VOCABULARY, TOKENS, IGNORED = 50304, 256, -100
COMPILED, UNCOMPILED = "compiled", "not compiled"
_TARGET: Final = Target(COMPILED, UNCOMPILED, "at most", 0.7)


def results(quick: bool) -> list[Result]:
    """Measure logits of both dtypes."""
    return [measure(dtype, repetitions=1 if quick else 5, turns=2 if quick else 25) for dtype in ("fp32", "bf16")]


def measure(dtype: str, repetitions: int, turns: int) -> Result:
    """Measure logits of one dtype, as a model computes them in that precision."""
    contestants = {
        UNCOMPILED: Contestant(partial(_losses, sum_cross_entropy, dtype, repetitions)),
        COMPILED: Contestant(partial(_losses, CompiledLoss(), dtype, repetitions)),
    }
    _, cpu_seconds = take_measured_turns(contestants, turns)
    return compare(
        f"compiled_loss_{dtype}",
        f"cross entropy of {TOKENS} tokens over a vocabulary of {VOCABULARY:,}, forward and backward, {dtype} logits",
        "CPU ms",
        {name: [each / repetitions * 1e3 for each in own] for name, own in cpu_seconds.items()},
        UNCOMPILED,
        [_TARGET],
    )


def _losses(function: SumLosses, dtype: str, repetitions: int, _: World) -> Turn:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, VOCABULARY, generator=generator)
    logits = logits.to(torch.bfloat16 if dtype == "bf16" else torch.float32).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return _turns(function, logits, targets, repetitions)


def _turns(function: SumLosses, logits: torch.Tensor, targets: torch.Tensor, repetitions: int) -> Callable[[], float]:
    def turn() -> float:
        for _ in range(repetitions):
            logits.grad = None
            function(logits, targets, IGNORED).backward()
        return 0.0

    return turn
