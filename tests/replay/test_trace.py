"""Two traces of a step agree to the bit, or the first tensor that differs is named."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_examine import examined
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.replay.trace import Trace, TraceHeader, compare_traces

HERE = TraceHeader(step=5, numerics={"torch": "2.15.0", "threads": 1}, sources={"nets.py": "0"}, steps={4: "0", 5: "0"})
ONE_BIT = torch.tensor(1 + 2**-23)


def traced(path: Path, change: Callable[[Tensor], Tensor] = torch.neg, head: TraceHeader = HERE) -> Path:
    trace = Trace(head)
    examined(change, trace)
    path.write_text(trace.to_text())
    return path


def in_backward(x: Tensor) -> Tensor:
    changed = torch.neg(x)
    if x.requires_grad:
        changed.register_hook(lambda gradient: gradient.index_put((torch.tensor(3), torch.tensor(2)), ONE_BIT))
    return changed


@pytest.mark.parametrize(
    ("change", "head", "found"),
    [
        (torch.neg, HERE, ["all [0-9,]+ tensors have the same bits"]),
        (
            lambda x: torch.neg(x) * 1,
            HERE,
            ["only now: micro-batch 0, forward: mul in changed, float32 .6, 8., and"],
        ),
        (
            lambda x: torch.neg(x).where(torch.arange(48).view(6, 8) != 21, x[2, 5] * -ONE_BIT),
            HERE,
            ["first difference, after \\d+ tensors that agree: micro-batch 0, forward: the module's output in changed"],
        ),
        (in_backward, HERE, ["first difference, .* micro-batch 0, backward: neg of NegBackward0 in changed"]),
        (torch.neg, HERE.model_copy(update={"steps": {4: "1"}}), ["step 4 already differs; trace step 4"]),
        (
            torch.neg,
            HERE.model_copy(update={"numerics": {"torch": "2.15.0", "threads": 2}, "sources": {"nets.py": "1"}}),
            ["threads: 1 before, 2 now", "nets.py: different file", "all [0-9,]+ tensors have the same bits"],
        ),
    ],
)
def test_the_first_tensor_that_differs_is_named(tmp_path: Path, change, head: TraceHeader, found: list[str]) -> None:
    agree, lines = compare_traces(traced(tmp_path / "a"), traced(tmp_path / "b", change, head))
    for line in found:
        assert any(re.match(line, each) for each in lines), lines
    assert agree == ("have the same bits" in lines[-1])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot read: No such file or directory"),
        ("", "not a trace; write one with `lockstep replay RUN --step N --trace FILE`"),
        ("{}\n", "not a trace"),
        (HERE.model_dump_json() + '\n["a"]', "not a trace"),
        (HERE.model_copy(update={"step": 6}).model_dump_json(), "traces step 6; trace the same step"),
    ],
)
def test_what_is_no_trace_is_said(tmp_path: Path, content: str | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "b").write_text(content)
    with pytest.raises(UsageError, match=problem):
        compare_traces(traced(tmp_path / "a"), tmp_path / "b")
