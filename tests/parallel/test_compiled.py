"""A compiled model gives the same bits on other processes and after a resume: each shape has kernels of its own."""

import shutil
from dataclasses import replace

import pytest
import toys
import worlds
from torch import Tensor, nn
from toys import Case

from lockstep.errors import UsageError
from lockstep.parallel.compiled import check_compiler


class Small(nn.Module):
    """Sums over the batch, whose kernels follow from its size."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3 * 8 * 8)
        self.head = nn.Linear(3 * 8 * 8, toys.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(images.flatten(1)).tanh().softmax(1))
        return logits


# Two shapes of micro-batches, and one of evaluations: each is some seconds of a compiler's work.
WHOLE = Case(2, samples=(18, 8, 18), side=8, model=Small, compile=True, optimizer="adamw")


@pytest.mark.worlds
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++")
def test_a_resume_on_other_processes_that_sees_the_shapes_in_another_order_keeps_the_bits() -> None:
    [(_, uninterrupted)] = worlds.run(1, toys.states, WHOLE, 0, None, timeout=300.0)
    [(_, plain)] = worlds.run(1, toys.states, replace(WHOLE, compile=False), 0, None)
    assert plain != uninterrupted  # so it was compiled
    [(state, trace)] = worlds.run(1, toys.states, replace(WHOLE, samples=WHOLE.samples[:1]), 0, None, timeout=300.0)
    for strategy in ("ddp", "zero1"):  # which begin with the short step
        for _, rest in worlds.run(2, toys.states, replace(WHOLE, strategy=strategy), 1, state, timeout=300.0):
            assert {**trace, **rest} == uninterrupted


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match="there is no no-such-compiler on this host; install it"):
        check_compiler()
