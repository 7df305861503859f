"""Forwards of one model that are under way at once keep their gradients, and what they leave in it, apart."""

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.isolated_grads import IsolatedGradients


class Keeping(nn.Module):
    """Leaves something behind in forward, as hooks and U-Nets do."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(3, 3)
        self.back = nn.Linear(3, 3)
        self.back.weight = self.into.weight
        self.fixed = nn.Linear(3, 3).requires_grad_(False)
        self.kept: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        self.kept = inputs
        return self.fixed(self.back(self.into(inputs)))


def test_each_forward_has_gradients_and_attributes_of_its_own() -> None:
    model, inputs = Keeping(), torch.randn(3, 2, 3)
    alone = []
    for each in inputs:
        model(each).sum().backward()
        alone.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    model.kept = None
    before = dict(model.state_dict(keep_vars=True))
    apart = IsolatedGradients(model, 3)
    with apart.restore_after():
        losses = []
        for number, each in enumerate(inputs):
            apart.activate(number)
            losses.append(model(each).sum())
        for number, each in enumerate(inputs):
            apart.activate(number)
            assert torch.equal(model.kept, each)
    assert model.kept is None
    assert all(before[name] is tensor for name, tensor in model.state_dict(keep_vars=True).items())
    torch.autograd.backward(losses)
    apart.check()
    for number, gradients in enumerate(alone):
        apart.move_gradients(number)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert (parameter.grad is None) == (gradient is None)
            assert gradient is None or torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]


def test_a_recurrent_layer_finds_its_weights_again() -> None:
    model, inputs = nn.LSTM(3, 3), torch.randn(2, 4, 1, 3)
    apart = IsolatedGradients(model, 2)
    with apart.restore_after():
        for number, each in enumerate(inputs):
            apart.activate(number)
            model(each)[0].sum().backward()
    apart.check()
    apart.move_gradients(1)
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(inputs[1])[0].sum().backward()
    assert all(
        torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
        for parameter, gradient in zip(model.parameters(), found, strict=True)
    )


def test_a_hook_of_a_parameter_is_kept() -> None:
    model = nn.Linear(3, 1, bias=False)
    model.weight.register_hook(lambda gradient: torch.zeros_like(gradient))
    apart = IsolatedGradients(model, 2)
    with apart.restore_after():
        apart.activate(1)
        model(torch.ones(1, 3)).backward()
    apart.move_gradients(1)
    assert not model.weight.grad.any()


def test_a_parameter_in_a_closure_is_refused() -> None:
    model = nn.Linear(3, 1)
    weight = model.weight
    apart = IsolatedGradients(model, 2)
    with apart.restore_after():
        apart.activate(0)
        (weight * model(torch.ones(1, 3))).sum().backward()
    with pytest.raises(
        UsageError, match=r"^parameter weight is used in forward through a reference outside its module"
    ):
        apart.check()
