"""Compiled blocks give the same bits under every strategy and after a resume: each shape has kernels of its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
import worlds
from component import needs_a_compiler
from torch import Tensor, nn
from toys import Case, Trace

from lockstep.comm.world import World
from lockstep.errors import UsageError
from lockstep.parallel.compiled import compile_blocks, find_modules_to_compile
from lockstep.parallel.engine import State

pytestmark = pytest.mark.slow("other programs, or minutes")


class Block(nn.Module):
    """Sums over the batch, whose kernels follow from its size; drawn numbers; a width that no vector divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.mix = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.mix(self.norm(x)).tanh().softmax(1))


class Blocks(nn.Module):
    """Two blocks of one class between what is in no block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3 * 8 * 8, 14)
        self.norm = nn.BatchNorm1d(14)
        self.blocks = nn.Sequential(Block(14), Block(14))
        self.head = nn.Linear(14, toys.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.stem(images.flatten(1)))).tanh())


# Two shapes of micro-batches, and one of evaluations: each is some seconds of a compiler's work.
WHOLE = Case(2, samples=(18, 8, 18), side=8, model=Blocks, compile=True, optimizer="adamw", clip=0.1)
ELSEWHERE: dict[str, dict[str, Any]] = {
    "zero3, recomputed": {"strategy": "zero3", "recompute": 1},
    "pipeline": {"strategy": "pipeline", "options": (("cut", ("blocks.1",)),)},
    "ddp": {},
}


@pytest.fixture(scope="module")
def undisturbed() -> tuple[State, Trace, Trace]:
    """Return the state and the trace of one process after a step, and its trace of all steps."""
    [(_, uninterrupted, graphs)] = worlds.run(1, compiled_states, WHOLE, 0, None)
    assert graphs == 3  # for three shapes: both blocks have one compilation
    [(_, plain, none)] = worlds.run(1, compiled_states, replace(WHOLE, compile=False), 0, None)
    assert plain != uninterrupted  # so it was compiled
    assert none == 0
    first = replace(WHOLE, samples=WHOLE.samples[:1])
    [(state, trace, _)] = worlds.run(1, compiled_states, first, 0, None)
    return state, trace, uninterrupted


@pytest.mark.worlds
@needs_a_compiler
@pytest.mark.parametrize(
    "placed",
    [
        "zero3, recomputed",
        "pipeline",
        pytest.param("ddp", marks=pytest.mark.slow("zero3 computes the same blocks on as many ranks")),
    ],
)
def test_a_resume_elsewhere_that_sees_the_shapes_in_another_order_keeps_the_bits(
    placed: str, undisturbed: tuple[State, Trace, Trace]
) -> None:
    state, trace, uninterrupted = undisturbed
    case = replace(WHOLE, **ELSEWHERE[placed])  # which begins with the short step
    for _, rest, graphs in worlds.run(2, compiled_states, case, 1, state):
        assert {**trace, **rest} == uninterrupted
        assert graphs == 3


def compiled_states(world: World, case: Case, first: int, state: State | None) -> tuple[State, Trace, int]:
    """Train with nothing compiled before, as in a process of its own; return the number of compilations, too."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()
    counters.clear()
    found, trace = toys.states(world, case, first, state)
    return found, trace, counters["stats"]["unique_graphs"]


def test_a_model_without_blocks_is_compiled_as_one() -> None:
    whole = toys.Plain()
    assert find_modules_to_compile(whole) == [whole]
    parts = Blocks()
    assert find_modules_to_compile(parts) == [*parts.blocks]


@needs_a_compiler
def test_a_block_that_cannot_be_compiled_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "g++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo g++ 1.0 || { echo no space left >&2; exit 1; }\n')
    broken.chmod(0o755)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    model = Blocks()
    compile_blocks(model, torch.device("cpu"))
    message = r"torch cannot compile block blocks\.0 \(.*test_compiled\.py:\d+\): .*: no space left; change"
    # monkeypatch would delete the setting instead of restoring it.
    compiler = torch._inductor.config.patch({"cpp.cxx": (None, str(broken))})
    with compiler, pytest.raises(UsageError, match=message):
        model(torch.randn(4, 3, 8, 8))
