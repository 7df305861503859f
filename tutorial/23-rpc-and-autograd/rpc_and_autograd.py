# $ TP_SOCKET_IFNAME=lo torchrun --standalone --nproc-per-node=3 tutorial/23-rpc-and-autograd/rpc_and_autograd.py
"""A model whose halves are on two workers, trained by calls: RPC, remote references, distributed autograd."""

import os

import torch
from torch import Tensor, nn
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn.functional import cross_entropy

STEPS, LR = 5, 0.5


def half(seed: int, inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs))


# What a worker is asked to do. The name of a function is sent, not its code: all ranks run this script.


def forward(module: rpc.RRef[nn.Module], x: Tensor) -> Tensor:
    output: Tensor = module.local_value()(x)  # this is the owner, so the value is here
    return output


def parameters(module: rpc.RRef[nn.Module]) -> list[rpc.RRef[Tensor]]:
    return [rpc.RRef(each) for each in module.local_value().parameters()]


def weights(module: rpc.RRef[nn.Module]) -> list[Tensor]:
    return [each.detach() for each in module.local_value().parameters()]


def gradients(module: rpc.RRef[nn.Module], context: int) -> int:
    """Return how many gradients this worker has in a context; none is in its parameters' `grad`."""
    assert all(each.grad is None for each in module.local_value().parameters())
    return len(autograd.get_gradients(context))


def train(x: Tensor, y: Tensor) -> None:
    # remote: the worker makes an object and keeps it; what comes back is a reference, at once.
    first = rpc.remote("worker1", half, args=(1, 20, 16))
    second = rpc.remote("worker2", half, args=(2, 16, 4))
    # rpc_async: both are asked before an answer is waited for. rpc_sync: ask and wait.
    asked = [rpc.rpc_async(each.owner(), parameters, args=(each,)) for each in (first, second)]
    references = [each for answer in asked for each in answer.wait()]
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=LR)  # an SGD on each owner

    whole = nn.Sequential(half(1, 20, 16), half(2, 16, 4))  # the same model, here
    sgd = torch.optim.SGD(whole.parameters(), lr=LR)
    for step in range(STEPS):
        with autograd.context() as context:
            hidden = rpc.rpc_sync(first.owner(), forward, args=(first, x))
            output = rpc.rpc_sync(second.owner(), forward, args=(second, hidden))
            loss = cross_entropy(output, y)
            autograd.backward(context, [loss])  # from here to worker2, back here, and to worker1
            found = [rpc.rpc_sync(each.owner(), gradients, args=(each, context)) for each in (first, second)]
            assert found == [4, 4]  # weight and bias of two layers
            optimizer.step(context)

        sgd.zero_grad()
        expected = cross_entropy(whole(x), y)
        expected.backward()
        sgd.step()
        print(f"step {step}: loss {loss.item():.4f} by two workers, {expected.item():.4f} in one process")
    mine = [each for part in (first, second) for each in rpc.rpc_sync(part.owner(), weights, args=(part,))]
    for theirs, ours in zip(mine, whole.parameters(), strict=True):
        assert torch.equal(theirs, ours)  # the same operations in the same order


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    if rank == 0:
        x = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
        train(x, x[:, :4].argmax(1))
    rpc.shutdown()  # waits until nobody asks any more: the workers have nothing else to do


if __name__ == "__main__":
    main()
