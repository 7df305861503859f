"""A model in chunks computes what it computes uncut, forward and backward, but for rounding."""

import cut_models
import pytest
import torch
from torch import Tensor, nn

from lockstep.models.gpt import gpt
from lockstep.parallel.tensor.built_in import get_built_in_plan
from lockstep.parallel.tensor.chunks import Region
from lockstep.parallel.tensor.layers import ColumnLinear, RowLinear, split_by_chunk
from lockstep.parallel.tensor.plan import split_into_chunks


def gradients(model: nn.Module, inputs: Tensor, count: int, plan: dict[str, str]) -> dict[str, Tensor]:
    """Return the outputs of a model in so many chunks, and its gradients by name, in their usual shapes."""
    chunked = split_into_chunks(model, plan, count) if count > 1 else {}
    outputs = model(inputs)
    (outputs.double() ** 2).sum().backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"outputs": outputs} | {
        name: chunked[name].from_rows(each) if name in chunked else each for name, each in found.items()
    }


def largest(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


@pytest.mark.parametrize("count", [2, 4])
def test_regions_of_every_kind(count: int) -> None:
    images = torch.randn(3, 3, 5, 5, dtype=torch.float64)
    expected = gradients(cut_models.made().double().eval(), images, 1, {})
    found = gradients(cut_models.made().double().eval(), images, count, dict(cut_models.PLAN))
    assert found.keys() == expected.keys()
    assert max(largest(found[name], expected[name]) for name in expected) < 1e-10


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("bias", [False, True])
def test_our_gpt(count: int, bias: bool) -> None:
    ids = torch.randint(50, (2, 9))
    results = []
    for chunks in (1, count):
        torch.manual_seed(0)
        model = gpt(vocabulary=50, context=9, layers=2, heads=6, width=36, positions="rotary", bias=bias).double()
        results.append(gradients(model, ids, chunks, get_built_in_plan(model)))
    assert results[1].keys() == results[0].keys()
    assert max(largest(results[1][name], each) for name, each in results[0].items()) < 1e-10


def test_layers_have_the_names_and_the_mode_of_those_they_replace() -> None:
    uncut, cut = cut_models.made(), cut_models.made().eval()
    uncut.blocks[0].down.weight.requires_grad_(False)
    cut.blocks[0].down.weight.requires_grad_(False)
    split_into_chunks(cut, dict(cut_models.PLAN), 2)
    named = [(name, each.requires_grad, each.numel()) for name, each in cut.named_parameters()]
    assert named == [(name, each.requires_grad, each.numel()) for name, each in uncut.named_parameters()]
    assert not any(each.training for each in cut.modules())
    kinds = [type(each) for each in cut.modules()]
    assert (kinds.count(ColumnLinear), kinds.count(RowLinear)) == (7, 5)


def test_a_chunk_has_the_bits_that_it_has_by_itself() -> None:
    """Of a product with a single row, on a CPU: there the address of a matrix matters."""
    chunks, inputs = Region(4, ""), torch.randn(64, 1, 11)
    weight = torch.randn(4 * 5, 11)  # chunks of 220 bytes
    for chunk, own in zip(split_by_chunk(weight, chunks), weight.tensor_split(4), strict=True):
        for each in inputs:
            assert torch.equal(each @ chunk.t(), each @ own.clone().t())


def test_autocast_multiplies_in_its_dtype() -> None:
    model = cut_models.made()
    split_into_chunks(model, dict(cut_models.PLAN), 2)
    seen = []
    model.blocks[0].gate.register_forward_hook(lambda module, given, made: seen.append(made.dtype))
    model.blocks[0].down.register_forward_hook(lambda module, given, made: seen.append(made.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 3, 5, 5)).sum().backward()
    assert seen == [torch.bfloat16] * 3  # twice by the first layer
    assert all(each.grad.dtype == torch.float32 for each in model.parameters() if each.grad is not None)


def test_a_gradient_of_a_gradient_is_refused() -> None:
    model = cut_models.made()
    split_into_chunks(model, dict(cut_models.PLAN), 2)
    images = torch.randn(2, 3, 5, 5, requires_grad=True)
    [gradient] = torch.autograd.grad(model(images).sum(), images, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
