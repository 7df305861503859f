"""nn.RReLU is rejected where torch's gradient of it is of memory that nobody wrote."""

from typing import Any

import loops
import pytest
import torch
from test_joined import joined
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import UsageError
from lockstep.parallel.random_relu import forbid_rrelu_with_hooks


class Net(nn.Module):
    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 13), nn.RReLU())
        self.head = nn.Linear(13, 3)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Any:
        hidden = checkpoint(self.layers, x, use_reentrant=False) if self.checkpoints else self.layers(x)
        return self.head(hidden)


def test_a_checkpoint_of_torch_computes_a_wrong_gradient_of_rrelu() -> None:
    """The reason for the check. If this fails, torch is right by now: remove lockstep/parallel/random_relu.py."""
    gradients = []
    # The checkpoint first: it reads memory that it never wrote, and this may hold the noise of an earlier call.
    for checkpoints in (True, False):
        torch.manual_seed(0)
        inputs = torch.randn(64, requires_grad=True)
        outputs = checkpoint(nn.RReLU(), inputs, use_reentrant=False) if checkpoints else nn.RReLU()(inputs)
        outputs.sum().backward()
        gradients.append(inputs.grad)
    assert not torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_loop_may_use_rrelu_outside_of_a_checkpoint(checkpoints: bool) -> None:
    def train() -> str:
        with joined() as run:
            model = Net(checkpoints=checkpoints)
            model, _ = run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for step in loops.computed(run, model, epochs=1):
                step.update()
            return run.fingerprint()

    if checkpoints:
        with pytest.raises(UsageError, match=r"^layers\.1: nn\.RReLU runs within torch\.utils\.checkpoint"):
            train()
    else:
        assert train() == train()


def test_an_evaluation_and_a_forward_without_gradients_may_use_it_anywhere() -> None:
    model = Net(checkpoints=True)
    forbid_rrelu_with_hooks(model)
    with torch.no_grad():
        model(torch.ones(2, 6))
    model.eval()(torch.ones(2, 6))
    with torch.autograd.graph.save_on_cpu(), pytest.raises(UsageError, match="saved_tensors_hooks"):
        model.train()(torch.ones(2, 6))
