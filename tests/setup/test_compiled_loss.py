"""A compiled loss is the loss of the task; it is compiled only where a training step computes it."""

import pytest
import torch
from component import needs_a_compiler

from lockstep.setup.compiled_loss import CompiledLoss, compile_language_loss
from lockstep.tasks.classification import Classification
from lockstep.tasks.language import Language
from lockstep.tasks.sft import Sft


@pytest.mark.slow("compiles")
@needs_a_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_loss_is_the_loss_and_reads_strided_logits_alike(dtype: torch.dtype) -> None:
    task = compile_language_loss(Language())
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 1200, generator=generator).to(dtype)
    batch = torch.randint(1200, (3, 8), generator=generator)
    values = []
    for loss, place in ((Language(), logits), (task, logits), (task, logits.mT.contiguous().mT)):
        outputs = place.detach().requires_grad_()
        value = loss.loss(outputs, batch)
        value.backward()
        values.append((value.detach(), outputs.grad))
    (plain, plain_gradient), (compiled, gradient), (strided, strided_gradient) = values
    assert compiled.dtype == torch.float32
    torch.testing.assert_close(compiled, plain)
    torch.testing.assert_close(gradient, plain_gradient)
    assert torch.equal(strided, compiled)
    assert torch.equal(strided_gradient, gradient)


def test_a_loss_is_not_compiled_for_an_evaluation_a_small_vocabulary_or_a_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("was compiled"))
    task = compile_language_loss(Language())
    batch = torch.randint(1200, (3, 8))
    task.loss(torch.randn(3, 7, 1200), batch)
    task.loss(torch.randn(3, 7, 1200, device="meta", requires_grad=True), batch.to("meta"))
    task.loss(torch.randn(3, 7, 20, requires_grad=True), batch % 20)


def test_only_losses_of_tokens_are_compiled() -> None:
    classification = Classification()
    assert compile_language_loss(classification) is classification
    assert isinstance(compile_language_loss(Sft()).sum_losses, CompiledLoss)
