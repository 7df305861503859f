"""An evaluation pass that an exception interrupts ends with the run, not when the exception is collected."""

import gc

import loops
import pytest
import torch
from one_process import joined


def interrupted(passes: list[object]) -> None:
    """Leave a pass by an exception, and keep the pass as the frames of a kept traceback do."""
    with joined() as run:
        loops.placed(run)
        batches = run.each(loops.data(), batch=4)
        passes.append(batches)
        for _ in batches:
            raise ZeroDivisionError


def test_a_pass_ends_with_the_run_although_the_script_keeps_its_exception() -> None:
    passes: list[object] = []
    with pytest.raises(ZeroDivisionError):
        interrupted(passes)
    assert torch.is_grad_enabled()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.no_grad():
        passes.clear()
        gc.collect()
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.rand(3), expected)
