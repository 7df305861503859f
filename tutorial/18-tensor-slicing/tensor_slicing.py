# $ torchrun --standalone --nproc-per-node=3 tutorial/18-tensor-slicing/tensor_slicing.py
"""A layer cut by features over the ranks: columns of the first matrix, rows of the second, and one sum."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

FEATURES, HIDDEN = 20, 48


class Enter(torch.autograd.Function):
    """All ranks use the same input, each for its own features: the gradients of the input are added."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class Leave(torch.autograd.Function):
    """Each rank has a part of a sum: the parts are added, and all get the gradient of the sum."""

    @staticmethod
    def forward(ctx: FunctionCtx, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient


class SlicedMLP(nn.Module):
    """This rank's slice of `up`, ReLU and `down`."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        own = slice(rank * HIDDEN // size, (rank + 1) * HIDDEN // size)  # of the hidden features
        self.up_weight = nn.Parameter(up.weight.detach()[own].clone())  # [hidden / size, features]
        self.up_bias = nn.Parameter(up.bias.detach()[own].clone())
        self.down_weight = nn.Parameter(down.weight.detach()[:, own].clone())  # [features, hidden / size]
        self.down_bias = nn.Parameter(down.bias.detach().clone())  # whole on each rank
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        # ReLU acts on each feature alone: between the two products nothing has to be exchanged.
        hidden = torch.relu(Enter.apply(x) @ self.up_weight.T + self.up_bias)
        total: Tensor = Leave.apply(hidden @ self.down_weight.T)
        return total + self.down_bias  # added once, after the sum


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    up, down = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, FEATURES)
    data = torch.randn(8, FEATURES)  # the same on all ranks: they share the features, not the samples

    x = data.clone().requires_grad_()
    expected = down(torch.relu(up(x)))
    expected.square().sum().backward()

    sliced, own_x = SlicedMLP(up, down), data.clone().requires_grad_()
    found = sliced(own_x)
    found.square().sum().backward()
    own = sliced.own
    assert up.weight.grad is not None
    assert down.weight.grad is not None
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own_x.grad, x.grad)
    torch.testing.assert_close(sliced.up_weight.grad, up.weight.grad[own])
    torch.testing.assert_close(sliced.down_weight.grad, down.weight.grad[:, own])
    torch.testing.assert_close(sliced.down_bias.grad, down.bias.grad)

    held = sum(each.numel() for each in sliced.parameters())
    whole = sum(each.numel() for layer in (up, down) for each in layer.parameters())
    print(f"rank {dist.get_rank()}: hidden features {own.start} to {own.stop - 1}, {held} of {whole} weights")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
