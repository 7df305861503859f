# $ torchrun --standalone --nproc-per-node=3 tutorial/15-syncbatchnorm/sync_batchnorm.py
"""BatchNorm over the samples of all ranks, by hand: the statistics are added up, and so are their gradients."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx


class AddOverRanks(torch.autograd.Function):
    """The sum over all ranks. Each rank's loss depends on it, so the gradient is a sum over all ranks too."""

    @staticmethod
    def forward(ctx: FunctionCtx, mine: Tensor) -> Tensor:
        total = mine.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def synced_batchnorm(x: Tensor, eps: float = 1e-5) -> Tensor:
    """Normalise the features of x, of shape [samples, features], by the mean and variance of all ranks' samples."""
    count = torch.full((1,), float(len(x)))
    sums: Tensor = AddOverRanks.apply(torch.cat([count, x.sum(0)]))  # counts too: ranks may have unequal batches
    mean = sums[1:] / sums[0]
    squares: Tensor = AddOverRanks.apply((x - mean).square().sum(0))
    return (x - mean) / (squares / sums[0] + eps).sqrt()


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(6 + each, 5, generator=generator) * (each + 1) for each in range(size)]  # not alike
    factors = [torch.randn(6 + each, 5, generator=generator) for each in range(size)]  # stand for the rest of a model

    whole = torch.cat(parts).requires_grad_()
    batchnorm = nn.BatchNorm1d(5, affine=False)
    expected = batchnorm(whole)  # what one process with all samples computes
    (expected * torch.cat(factors)).sum().backward()
    first = sum(len(part) for part in parts[:rank])
    mine = slice(first, first + len(parts[rank]))

    x = parts[rank].clone().requires_grad_()
    found = synced_batchnorm(x)
    (found * factors[rank]).sum().backward()
    assert x.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(found, expected[mine])
    torch.testing.assert_close(x.grad, whole.grad[mine])

    # The running statistics are buffers: they are saved and loaded with the weights.
    assert set(batchnorm.state_dict()) == {"running_mean", "running_var", "num_batches_tracked"}

    alone = batchnorm(parts[rank])
    off = (alone - expected[mine]).abs().max().item()
    assert size == 1 or off > 0.1
    print(f"rank {rank}: BatchNorm over its own {len(x)} samples is off by up to {off:.2f}, over all ranks by nothing")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
