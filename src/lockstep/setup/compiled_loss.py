"""Compiles the loss of language models, in addition to the blocks of the model (parallel/compiled.py).

The logits are the largest tensors of a step. Uncompiled, the cross entropy reads and writes them about six times. Every
strategy calls the loss with the logits of a micro-batch, so all strategies compile the same function for the same
shapes.
"""

from dataclasses import replace
from typing import Final, final

from torch import Tensor

from lockstep.parallel.compiled import compile_function
from lockstep.tasks.base import Task
from lockstep.tasks.language import Language, SumLosses, sum_cross_entropy
from lockstep.tasks.sft import Sft

_MIN_LOGITS: Final = 1024  # with fewer logits per position, the loss takes a negligible part of the step time


def compile_language_loss(task: Task) -> Task:
    """Return `task` with a compiled loss if it trains a language model. Otherwise, return it unchanged."""
    return replace(task, sum_losses=CompiledLoss()) if isinstance(task, Language | Sft) else task


@final
class CompiledLoss:
    """Computes the summed cross entropy of tasks/language.py with compiled kernels.

    The kernels are compiled in the first training step. Evaluations run eagerly, because they can have many different
    shapes, and compiling for a shape takes seconds.
    """

    def __init__(self) -> None:
        self._compiled: SumLosses | None = None

    def __call__(self, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        if logits.is_meta or not logits.requires_grad or logits.shape[-1] < _MIN_LOGITS:
            return sum_cross_entropy(logits, targets, ignore_index)
        if self._compiled is None:
            self._compiled = compile_function(sum_cross_entropy, "the loss", sum_cross_entropy.__code__)
        # Compiled kernels depend on strides, and the strides of the logits depend on the strategy.
        return self._compiled(logits.contiguous(), targets.contiguous(), ignore_index)
